"""Graphs of deep models made from shallow traces, against real traces of the deep ones."""

import dataclasses
import functools
import re

import paddle
import pytest
from paddle.utils import unique_name
from test_layers import Builder

from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.handover.pir.configs import config_graph
from paddle_rbt_plugin.handover.pir.trace import trace_layer
from paddle_rbt_plugin.layers import cluster_layers, repeat_layers
from paddle_rbt_plugin.models import GPTConfig, LlamaConfig, build, input_spec

CONFIGS = {
    "gpt": GPTConfig(layers=3, hidden=32, ffn=64, heads=4, vocab=64, seq=16),
    "gpt with dropout": GPTConfig(layers=3, hidden=32, ffn=64, heads=4, vocab=64, seq=16, dropout=0.1),
    "llama": LlamaConfig(layers=3, hidden=32, ffn=48, heads=4, kv_heads=2, vocab=64, seq=16),
}
MODELS = pytest.mark.parametrize("model", CONFIGS)


def lazy(model, layers):
    with paddle.LazyGuard():
        return build(dataclasses.replace(CONFIGS[model], layers=layers))


@functools.cache
def trace(model, layers):
    with unique_name.guard():
        return trace_layer(lazy(model, layers), input_spec(CONFIGS[model], 2)).graph


def repeat(model, count, traced=3):
    graph = trace(model, traced)
    return repeat_layers(graph, cluster_layers(graph), count)


@MODELS
@pytest.mark.parametrize("n", [1, 2, 3])
def test_n_traced_layers_make_n_groups_with_embedding_in_the_first_and_head_in_the_last(model, n):
    graph = trace(model, n)
    groups = cluster_layers(graph).groups
    assert len(groups) == n
    assert graph.ops[groups[0][0]].type == "embedding"
    assert graph.loss in graph.ops[groups[-1][-1]].results


@MODELS
@pytest.mark.parametrize("n", range(2, 31))
def test_n_repeated_layers_make_n_groups_of_equal_blocks(model, n):
    graph = repeat(model, n)
    layers = cluster_layers(graph)
    assert layers.count == n
    assert len({block.kind for block in layers.blocks}) == 1
    assert [i for group in layers.groups for i in group] == list(range(len(graph.ops)))


@MODELS
def test_a_traced_block_is_what_struct_name_says_a_layer_is(model):
    graph = trace(model, 3)
    layers = [
        sorted({re.search("Block[_0-9]*|$", graph.ops[i].scope)[0] for i in s.ops}) for s in cluster_layers(graph).segments
    ]
    assert layers == [[""], ["Block"], ["Block_1"], ["Block_2"], [""]]


@MODELS
def test_layers_are_found_without_struct_name(model):
    graph = trace(model, 3)
    bare = Graph(graph.tensors, tuple(dataclasses.replace(op, scope="") for op in graph), graph.loss)
    assert cluster_layers(bare) == cluster_layers(graph)


@MODELS
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_a_repeated_graph_is_the_trace_of_the_deeper_model(model, n):
    repeated, traced = repeat(model, n), trace(model, n)
    assert repeated.signature == traced.signature
    assert repeated.loss == traced.loss
    assert [op.name for op in repeated] == [op.name for op in traced]
    for ours, theirs in zip(repeated.tensors, traced.tensors, strict=True):
        assert ours == theirs


@MODELS
def test_more_than_three_traced_layers_repeat_as_well(model):
    assert repeat(model, 8, traced=5).signature == trace(model, 8).signature


@MODELS
def test_scopes_count_on(model):
    def below_the_root(graph):
        return [op.scope.split("/")[2:] for op in graph]

    assert below_the_root(repeat(model, 5)) == below_the_root(trace(model, 5))


@MODELS
def test_the_graph_of_a_config_has_the_parameters_of_the_deep_model(model):
    with unique_name.guard():
        names = {structured: p.name for structured, p in lazy(model, 12).named_parameters()}
    repeated = config_graph(dataclasses.replace(CONFIGS[model], layers=12), 2)
    assert {t.structured_name: t.name for t in repeated.params} == names


def test_tied_and_shared_tensors_stay_shared():
    graph = repeat("gpt", 6)
    word_embeddings = next(t for t in graph.params if t.structured_name == "gpt.word_embeddings.weight")
    assert [op.type for op in graph.consumers(word_embeddings.index)] == ["embedding", "matmul"]
    assert len(graph.consumers(graph.tensor("attention_mask").index)) == 6


def test_repeated_ops_have_no_place_in_a_program():
    assert {op.source for op in repeat("gpt", 5)} == {-1}


def test_fewer_than_three_layers_cannot_be_repeated():
    with pytest.raises(UnsupportedProgram, match="at least 3 layers are needed to make at least 2, not 2 to make 8"):
        repeat("gpt", 8, traced=2)


def test_a_layer_in_the_middle_that_is_read_from_outside_cannot_be_repeated():
    graph = trace("gpt", 3)
    middle = graph.ops[cluster_layers(graph).blocks[1].ops[-1]].results[0]
    last = graph.ops[-1]
    spied = dataclasses.replace(last, inputs={**last.inputs, "extra": (middle,)})
    graph = Graph(graph.tensors, (*graph.ops[:-1], spied), graph.loss)
    with pytest.raises(UnsupportedProgram, match="of one in the middle is read from outside"):
        repeat_layers(graph, cluster_layers(graph), 5)


def test_layers_that_read_further_back_than_the_one_before_cannot_be_repeated():
    g = Builder()
    before, x = g.data(4, 8), g.embed()
    for _ in range(4):
        before, x = x, g.op("mix", g.linear(x), before)
    graph = g.graph(g.head(x))
    with pytest.raises(UnsupportedProgram, match="are neither shared, nor handed on, nor parameters of their own"):
        repeat_layers(graph, cluster_layers(graph), 5)


def test_different_layers_cannot_be_repeated():
    g = Builder()
    x = g.embed()
    for i in range(6):
        x = g.op("dropout", g.block(x), p=0.1 if i < 3 else 0.2)
    graph = g.graph(g.head(x))
    with pytest.raises(UnsupportedProgram, match="cannot repeat layers that differ"):
        repeat_layers(graph, cluster_layers(graph), 8)
