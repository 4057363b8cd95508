"""The seven reference patterns: their specs, and their matches in whole models as Paddle traces them."""

from collections import Counter
from functools import cache

import pytest
from pattern_graphs import traced

from paddle_rbt_plugin.layers import cluster_layers
from paddle_rbt_plugin.models import GPTConfig, LlamaConfig
from paddle_rbt_plugin.pattern import dims_mapping, match_all
from paddle_rbt_plugin.plugins import load_plugins

# Paddle's rule_based_tuner.py, 3.3.1, in its order of meshes; the position embedding's output under dp_mp is [-1, -1, -1]
# there, against its own other meshes.
MESHES = {"dp_mp": ("dp", "mp"), "mp_dp": ("mp", "dp"), "mp": ("mp",), "dp": ("dp",)}
COLUMN = {"dp_mp": (-1, 1), "mp_dp": (-1, 0), "mp": (-1, 0), "dp": (-1, -1)}
ROW = {"dp_mp": (1, -1), "mp_dp": (0, -1), "mp": (0, -1), "dp": (-1, -1)}
WHOLE = dict.fromkeys(MESHES, (-1, -1))
BATCH_2D = {"dp_mp": (0, -1), "mp_dp": (1, -1), "mp": (-1, -1), "dp": (0, -1)}
BATCH_3D = {mesh: (*mapping, -1) for mesh, mapping in BATCH_2D.items()}
REFERENCE = {
    "qkv": {"x": BATCH_3D, "q_weight": COLUMN, "k_weight": COLUMN, "v_weight": COLUMN},
    "row_matmul": {"weight": ROW},
    "ffn": {"x": BATCH_3D, "up_weight": COLUMN, "down_weight": ROW},
    "shared_word_embedding": {"ids": BATCH_2D, "weight": ROW, "x": BATCH_3D},
    "position_embedding": {"ids": BATCH_2D, "weight": WHOLE, "out": BATCH_3D},
    "unsqueeze_data": {"data": BATCH_2D},
    "reshape_data": {"data": BATCH_2D},
}
BIASES = {
    "qkv": {"q_bias": (1,), "k_bias": (1,), "v_bias": (1,)},
    "row_matmul": {"bias": (-1,)},
    "ffn": {"up_bias": (1,), "down_bias": (-1,)},
}


@cache
def plugins():
    return load_plugins()


def found(graph, **options):
    names = REFERENCE.keys()
    return match_all(graph, [p for p in plugins().patterns if p.name in names], **options)


@pytest.mark.parametrize("name", REFERENCE)
def test_the_specs_expand_to_the_reference_tables(name):
    shard = plugins().pattern(name).pattern.shard
    for tensor, table in REFERENCE[name].items():
        for mesh, axes in MESHES.items():
            assert dims_mapping(shard[tensor], len(table[mesh]), axes) == table[mesh], (tensor, mesh)


@pytest.mark.parametrize("name", BIASES)
def test_biases_go_with_their_weights_or_stay_whole(name):
    shard = plugins().pattern(name).pattern.shard
    assert {tensor: dims_mapping(shard[tensor], 1, ("dp", "mp")) for tensor in BIASES[name]} == BIASES[name]


GPT = {"layers": 2, "hidden": 64, "ffn": 256, "heads": 4, "vocab": 128, "seq": 32}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_gpt_has_one_match_of_each_kind_per_place(layers, dropout):
    graph = traced(GPTConfig(**{**GPT, "layers": layers, "dropout": dropout}))
    per_block = dict.fromkeys(("qkv", "row_matmul", "ffn"), layers)
    once = dict.fromkeys(("shared_word_embedding", "position_embedding", "unsqueeze_data", "reshape_data"), 1)
    for options in ({}, {"layers": cluster_layers(graph)}):
        result = found(graph, **options)
        assert Counter(m.pattern for m in result.matches) == per_block | once
        (dropped,) = result.dropped
        assert (dropped.match.pattern, dropped.winner.pattern) == ("position_embedding", "shared_word_embedding")
        claimed = {graph.tensors[t].name for t in result.claims}
        unclaimed = {p.name for p in graph.params} - claimed
        assert all(name.startswith("layer_norm") for name in unclaimed)
        assert {d.name for d in graph.data} - claimed == {"attention_mask"}


def test_a_gpt_says_where_its_heads_and_its_vocabulary_are():
    graph = traced(GPTConfig(**GPT))
    result = found(graph)
    sizes = {
        match.dim_name(tensor, dim): graph.tensors[tensor].shape[dim]
        for match in result.matches
        for tensor, spec in match.specs.items()
        for dim, axis in enumerate(spec)
        if axis == "mp"
    }
    assert sizes["attention heads"] == 4
    assert sizes["vocabulary"] == 128
    assert sizes["feed-forward size"] == 256


def test_a_llama_with_grouped_queries_has_its_attention_matched_through_the_rotary_embedding():
    config = LlamaConfig(layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, vocab=128, seq=32)
    graph = traced(config)
    result = found(graph, layers=cluster_layers(graph))
    counts = Counter(m.pattern for m in result.matches)
    assert (counts["qkv"], counts["row_matmul"], counts["ffn"]) == (2, 2, 0)
    qkv = next(m for m in result.matches if m.pattern == "qkv")
    heads = {qkv.dim_name(qkv.tensors[n], 2): graph.tensors[qkv.tensors[n]].shape[2] for n in ("q_heads", "k_heads", "v_heads")}
    assert heads == {"attention heads": 4, "key and value heads": 2}
    assert counts["position_embedding"] == 0, "an untied word embedding is none"
    assert not result.dropped and not result.failed and not result.incomplete
