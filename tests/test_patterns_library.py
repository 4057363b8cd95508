"""What the patterns beyond the reference match, what they ask for, and what they leave alone."""

from __future__ import annotations

from collections import Counter
from functools import cache

import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F
from paddle.static import InputSpec
from zoo import graph
from zoo.parts import HEADS, HIDDEN, GatedFeedForward, core, linear, merge_heads

from paddle_rbt_plugin.handover.pir.trace import trace_layer
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import Analysis, analyse


@cache
def plugins():
    return load_plugins()


def analysed(forward) -> Analysis:
    """A Layer whose forward, a function of itself and of hidden states [4, 16, 64], is ``forward``."""
    found = trace_layer(forward, [InputSpec([4, 16, HIDDEN], "float32", "x")]).graph
    return analyse(found, plugins().patterns)


def counts(analysis: Analysis) -> Counter:
    return Counter(m.pattern for m in analysis.matches.matches)


def spec_of(analysis: Analysis, pattern: str, name: str):
    match = next(m for m in analysis.matches.matches if m.pattern == pattern)
    return match.specs.get(match.tensors[name])


class FusedAttention(nn.Layer):
    """Attention from one projection, cut in one of several ways."""

    def __init__(self, cut, width=3 * HIDDEN):
        super().__init__()
        self.cut = cut
        self.qkv, self.out = linear(HIDDEN, width), linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return paddle.mean(self.out(merge_heads(core(*self.cut(self.qkv(x * 2.0))))))


def groups(qkv):
    """Four groups of two query heads with a head of keys and of values: [kv heads, 2 + 1 + 1, d]."""
    query, key, value = paddle.split(paddle.reshape(qkv, [0, 0, 4, 4 * 8]), [16, 8, 8], axis=-1)
    query = paddle.reshape(query, [0, 0, HEADS, 8])
    return query, paddle.repeat_interleave(key, 2, axis=2), paddle.repeat_interleave(value, 2, axis=2)


HEADS_OUTSIDE = {
    "[heads, 3 d]": lambda qkv: paddle.split(paddle.reshape(qkv, [0, 0, HEADS, -1]), 3, axis=-1),
    "[heads, 3, d]": lambda qkv: paddle.unbind(paddle.reshape(qkv, [0, 0, HEADS, 3, -1]), axis=3),
    "[kv heads, 4, d]": groups,
}
PARTS_OUTSIDE = {
    "[3, heads, d]": lambda qkv: paddle.unbind(paddle.reshape(qkv, [0, 0, 3, HEADS, -1]), axis=2),
    "[3, heads, d] transposed": lambda qkv: [
        paddle.transpose(part, [0, 2, 1, 3])
        for part in paddle.unbind(paddle.transpose(paddle.reshape(qkv, [0, 0, 3, HEADS, 8]), [2, 0, 3, 1, 4]), axis=0)
    ],
    "parts before heads": lambda qkv: [paddle.reshape(p, [0, 0, HEADS, -1]) for p in paddle.split(qkv, 3, axis=-1)],
    "slices before heads": lambda qkv: [paddle.reshape(qkv[..., i * 64 : i * 64 + 64], [0, 0, HEADS, 8]) for i in range(3)],
}


@pytest.mark.parametrize("layout", HEADS_OUTSIDE)
def test_where_heads_run_slowest_the_number_of_heads_decides_what_is_legal(layout):
    width = 4 * 4 * 8 if "kv" in layout else 3 * HIDDEN
    found = analysed(FusedAttention(HEADS_OUTSIDE[layout], width))
    assert counts(found)["fused_qkv"] == counts(found)["row_matmul"] == 1
    assert spec_of(found, "fused_qkv", "weight") == (None, "mp")
    assert spec_of(found, "fused_qkv", "heads")[:3] == ("dp", None, "mp")
    heads = 4 if "kv" in layout else HEADS
    assert not found.indivisible({"mp": heads})
    assert f"the {heads} attention heads" in str(found.indivisible({"mp": 2 * heads}))


@pytest.mark.parametrize("layout", PARTS_OUTSIDE)
def test_where_query_key_and_value_run_slowest_only_the_weight_is_claimed(layout):
    found = analysed(FusedAttention(PARTS_OUTSIDE[layout]))
    assert counts(found)["fused_qkv"] == 1
    match = next(m for m in found.matches.matches if m.pattern == "fused_qkv")
    claimed = {name for name, t in match.tensors.items() if t in match.specs and any(match.specs[t])}
    assert claimed == {"x", "weight", "bias"}


def test_heads_merged_twice_over_are_merged():
    """As GLM-OCR does it: a reshape in the attention function, and one behind it."""

    class Reshaped(FusedAttention):
        def forward(self, x):
            merged = merge_heads(core(*self.cut(self.qkv(x * 2.0))))
            return paddle.mean(self.out(paddle.reshape(merged, [4, 16, -1])))

    assert counts(analysed(Reshaped(HEADS_OUTSIDE["[heads, 3, d]"])))["row_matmul"] == 1


def test_shared_keys_and_values_decide_which_degrees_are_legal():
    found = analyse(graph("LLaMA-3"), plugins().patterns)
    assert not found.indivisible({"mp": 4})
    assert "the 4 key and value heads" in str(found.indivisible({"mp": 8}))


def test_a_single_head_of_keys_and_values_stays_whole_and_forbids_nothing():
    found = analyse(graph("Multi-query"), plugins().patterns)
    assert counts(found)["multi_query"] == 2 and not counts(found)["qkv"]
    assert spec_of(found, "multi_query", "k_weight") == (None, None)
    assert not found.indivisible({"mp": 8})


def test_self_attention_and_cross_attention_are_told_apart():
    """Paddle's own tuner takes the keys and values of one and the queries of the other for one attention."""
    patterns = counts(analyse(graph("T5"), plugins().patterns))
    assert (patterns["qkv"], patterns["cross_attention"], patterns["row_matmul"]) == (4, 2, 6)


class Wrapped(nn.Layer):
    def __init__(self, layer, *more):
        super().__init__()
        self.layer, self.more = layer, nn.LayerList(more)

    def forward(self, x):
        h = x * 2.0
        return paddle.mean(self.layer(h) + sum(layer(h) for layer in self.more))


@pytest.mark.parametrize("activation", [F.silu, F.gelu], ids=["SwiGLU", "GeGLU"])
def test_gated_networks_are_column_and_then_row_parallel(activation):
    found = analysed(Wrapped(GatedFeedForward(activation)))
    assert counts(found) == {"gated_ffn": 1}
    weights = [spec_of(found, "gated_ffn", f"{name}_weight") for name in ("gate", "up", "down")]
    assert weights == [(None, "mp"), (None, "mp"), ("mp", None)]


def test_two_gated_networks_that_share_their_input_are_two():
    found = analysed(Wrapped(GatedFeedForward(F.silu), GatedFeedForward(F.silu)))
    assert counts(found) == {"gated_ffn": 2}


def test_one_weight_for_gate_and_up_is_known():
    assert counts(analysed(Wrapped(GatedFeedForward(F.silu, fused=True)))) == {"fused_gated_ffn": 1}


@pytest.mark.parametrize("core", ["flash_attn", "flashmask_attention", "memory_efficient_attention"])
def test_a_fused_attention_core_is_attention(core):
    """The CPU wheel has no kernel, so the graph is written by hand."""
    from pattern_graphs import GraphWriter

    from paddle_rbt_plugin.pattern import match_all

    w = GraphWriter()
    x = w.op("layer_norm", w.data(8, 16, 64))
    heads = [w.op("reshape", w.linear(x, 64, 64), shape=(8, 16, 4, 16)) for _ in range(3)]
    w.linear(w.op("reshape", w.op("cast", w.op(core, *heads, shape=(8, 16, 4, 16)), shape=(8, 16, 4, 16))), 64, 64)
    found = match_all(w.graph(), [p for p in plugins().patterns if p.name in ("qkv", "row_matmul", "fused_qkv")]).matches
    assert sorted(m.pattern for m in found) == ["qkv", "row_matmul"]


@pytest.mark.parametrize("operands", [1, 2])
def test_the_swiglu_op_is_known(operands):
    """The CPU wheel has no kernel, so the graph is written by hand."""
    from pattern_graphs import GraphWriter

    from paddle_rbt_plugin.pattern import match_all

    w = GraphWriter()
    x = w.op("layer_norm", w.data(8, 16, 64))
    parts = [w.linear(x, 64, 256, bias=False) for _ in range(operands)]
    w.linear(w.op("swiglu", *parts), 256, 64, bias=False)
    found = match_all(w.graph(), [p for p in plugins().patterns if "ffn" in p.name]).matches
    assert [m.pattern for m in found] == [{1: "fused_gated_ffn", 2: "gated_ffn"}[operands]]


def test_an_untied_embedding_is_no_position_embedding_and_its_head_is_sharded():
    """Paddle's own tuner takes it for one."""
    found = analyse(graph("LLaMA-2"), plugins().patterns)
    assert counts(found)["word_embedding"] == counts(found)["lm_head"] == 1 and not counts(found)["position_embedding"]
    assert spec_of(found, "word_embedding", "weight") == ("mp", None)
    assert spec_of(found, "lm_head", "weight") == (None, "mp")


def test_a_tied_head_is_the_embeddings_business_alone():
    found = counts(analyse(graph("GPT-2"), plugins().patterns))
    assert found["shared_word_embedding"] == 1 and not found["lm_head"] and not found["word_embedding"]


def test_of_two_untied_tables_that_are_added_the_larger_is_the_words():
    class Embeddings(nn.Layer):
        def __init__(self):
            super().__init__()
            self.words, self.positions = nn.Embedding(128, HIDDEN), nn.Embedding(16, HIDDEN)

        def forward(self, tokens, positions):
            return paddle.mean(self.words(tokens) + self.positions(positions))

    spec = [InputSpec([4, 16], "int64", name) for name in ("tokens", "positions")]
    found = analyse(trace_layer(Embeddings(), spec).graph, plugins().patterns)
    shapes = {found.graph.tensors[t].shape: (m.pattern, s) for t, (s, m) in found.claims.items()}
    assert shapes[128, HIDDEN] == ("word_embedding", ("mp", None))
    assert shapes[16, HIDDEN] == ("position_embedding", (None, None))
