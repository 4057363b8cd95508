"""What each reference pattern matches beside GPT, and what it must leave alone."""

from functools import cache

import pytest
from pattern_graphs import GraphWriter, self_attention

from paddle_rbt_plugin.pattern import match_all
from paddle_rbt_plugin.plugins import load_plugins


@cache
def plugins():
    return load_plugins()


def matches(w, *names):
    return match_all(w.graph(), [plugins().pattern(name) for name in names]).matches


def hidden(w):
    """A tensor of [8, 16, 64] that is no input of the program."""
    return w.op("layer_norm", w.data(8, 16, 64))


@pytest.mark.parametrize("bias", [True, False])
def test_qkv_takes_biases_where_there_are_any(bias):
    w = GraphWriter()
    self_attention(w, hidden(w), bias)
    (match,) = matches(w, "qkv")
    assert len(match.specs) == (10 if bias else 7)


def test_qkv_is_one_attention_block_never_the_projections_of_two():
    """Encoder and decoder attention that read the same tensor."""
    w = GraphWriter()
    x = hidden(w)
    self_attention(w, x)
    self_attention(w, x)
    first, second = matches(w, "qkv")
    weights = [{m.tensors[f"{n}_weight"] for n in "qkv"} for m in (first, second)]
    assert len(weights[0] | weights[1]) == 6


def test_qkv_leaves_cross_attention_alone():
    w = GraphWriter()
    self_attention(w, hidden(w), context=w.op("layer_norm", w.data(8, 16, 64)))
    assert not matches(w, "qkv")
    assert len(matches(w, "row_matmul")) == 1


def test_qkv_knows_a_fused_core():
    w = GraphWriter()
    x = hidden(w)
    q, k, v = (w.op("reshape", w.linear(x, 64, 64), shape=(8, 16, 4, 16)) for _ in range(3))
    out = w.op("flash_attn", q, k, v, shape=(8, 16, 4, 16))
    w.linear(w.op("reshape", out), 64, 64)
    (qkv,) = matches(w, "qkv")
    assert [w.tensors[qkv.tensors[f"{n}_heads"]].index for n in "qkv"] == [q, k, v]
    assert len(matches(w, "row_matmul")) == 1


def test_a_transposed_weight_is_no_column_parallel_one():
    w = GraphWriter()
    x = hidden(w)
    h = w.op("relu", w.op("matmul", x, w.param(256, 64), transpose_y=True, shape=(8, 16, 256)))
    w.op("matmul", h, w.param(64, 256), transpose_y=True)
    assert not matches(w, "ffn")


def test_row_matmul_is_the_output_of_attention_not_any_linear_after_a_reshape():
    w = GraphWriter()
    self_attention(w, hidden(w))
    w.linear(w.op("reshape", w.data(8, 3, 16, 16), shape=(8, 16, 48)), 48, 64)  # patches of an image
    w.linear(w.op("reshape", hidden(w), shape=(8, 1024)), 1024, 10)  # a classifier
    assert len(matches(w, "row_matmul")) == 1


def test_an_untied_head_is_no_row_matmul():
    w = GraphWriter()
    w.linear(hidden(w), 64, 1000, bias=False)
    assert not matches(w, "row_matmul", "qkv", "ffn", "shared_word_embedding")


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
def test_ffn_takes_several_activations_and_dropout_behind_them(activation):
    w = GraphWriter()
    w.linear(w.op("dropout", w.op(activation, w.linear(hidden(w), 64, 256))), 256, 64)
    (match,) = matches(w, "ffn")
    assert len(match.specs) == 5


def test_ffn_leaves_a_pooler_with_its_classifier_alone():
    w = GraphWriter()
    w.linear(w.op("tanh", w.linear(hidden(w), 64, 64)), 64, 2)
    assert not matches(w, "ffn")


def test_parallel_blocks_that_share_their_input_keep_all_their_matches():
    """GPT-J."""
    w = GraphWriter()
    x = hidden(w)
    self_attention(w, x)
    w.linear(w.op("gelu", w.linear(x, 64, 256)), 256, 64)
    w.linear(w.op("gelu", w.linear(x, 64, 256)), 256, 64)
    assert sorted(m.pattern for m in matches(w, "qkv", "ffn", "row_matmul")) == ["ffn", "ffn", "qkv", "row_matmul"]


@pytest.mark.parametrize("transposed_by", ["attribute", "op"])
def test_a_tied_embedding_is_found_however_the_head_transposes_it(transposed_by):
    w = GraphWriter()
    weight = w.param(1000, 64)
    w.op("embedding", w.data(8, 16), weight)
    if transposed_by == "attribute":
        w.op("matmul", hidden(w), weight, transpose_y=True)
    else:
        w.op("matmul", hidden(w), w.op("transpose", weight, shape=(64, 1000)), transpose_y=False)
    assert len(matches(w, "shared_word_embedding")) == 1


def test_a_lone_embedding_is_no_position_embedding():
    w = GraphWriter()
    w.op("layer_norm", w.op("embedding", w.data(8, 16), w.param(1000, 64)))
    assert not matches(w, "position_embedding")


def test_all_three_embeddings_of_bert_are_matched():
    w = GraphWriter()
    word, position, kind = (w.op("embedding", w.data(8, 16), w.param(n, 64)) for n in (1000, 16, 2))
    w.op("add", w.op("add", word, position), kind)
    assert len({m.tensors["weight"] for m in matches(w, "position_embedding")}) == 3


def test_positions_without_a_batch_dimension_are_not_sharded():
    w = GraphWriter()
    word = w.op("embedding", w.data(8, 16), w.param(1000, 64))
    w.op("add", word, w.op("embedding", w.data(1, 16), w.param(16, 64), shape=(1, 16, 64)))
    assert [m.tensors["ids"] for m in matches(w, "position_embedding")] == [0]


@pytest.mark.parametrize("shape", [(8,), (8, 16), (8, 16, 4)])
def test_data_of_any_rank_is_sharded_along_its_batch(shape):
    w = GraphWriter()
    w.op("unsqueeze", w.data(*shape), shape=(*shape, 1))
    w.op("reshape", w.data(*shape), shape=(-1,))
    found = matches(w, "unsqueeze_data", "reshape_data")
    assert [list(m.specs.values()) for m in found] == [[("dp",) + (None,) * (len(shape) - 1)]] * 2


def test_data_without_a_batch_dimension_is_left_alone():
    w = GraphWriter()
    w.op("unsqueeze", w.data(16, 16), shape=(1, 16, 16))  # a mask for all sequences
    w.op("unsqueeze", w.data(), shape=(1,))
    w.op("reshape", w.data(1, 16), shape=(16,))
    w.op("reshape", w.data(), shape=(1,))
    assert not matches(w, "unsqueeze_data", "reshape_data")
