"""Clustering of ops into layers, on graphs made by hand."""

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paddle_rbt_plugin.graph import Graph, Op, Tensor
from paddle_rbt_plugin.layers import cluster_layers, external_inputs

HIDDEN = (4, 8)


class Builder:
    """Writes a graph op by op; tensors are known by their positions."""

    def __init__(self):
        self.tensors, self.ops = [], []

    def tensor(self, shape, kind, **fields):
        self.tensors.append(Tensor(len(self.tensors), f"{kind}_{len(self.tensors)}", shape, "float32", kind, **fields))
        return len(self.tensors) - 1

    def param(self, *shape, **fields):
        return self.tensor(shape, "param", **fields)

    def data(self, *shape):
        return self.tensor(shape, "data", stop_gradient=True)

    def op(self, op_type, *inputs, shape=HIDDEN, **attrs):
        out = self.tensor(shape, "var")
        index = len(self.ops)
        slots = {f"in{i}": (t,) for i, t in enumerate(inputs)}
        self.ops.append(Op(index, f"{op_type}_{index}", op_type, slots, {"out": (out,)}, attrs))
        return out

    def linear(self, x, width=8, **fields):
        rows, columns = self.tensors[x].shape[0], self.tensors[x].shape[-1]
        return self.op("matmul", x, self.param(columns, width, **fields), shape=(rows, width))

    def norm(self, x):
        return self.op("layer_norm", x, self.param(8))

    def embed(self, vocab=1000):
        return self.op("embedding", self.data(4), self.param(vocab, 8))

    def head(self, x):
        logits = self.linear(self.norm(x), 1000)
        return self.op("mean", self.op("cross_entropy", logits, self.data(4), shape=(4, 1)), shape=())

    def attention(self, x, memory=None, mask=None):
        """What x looks up in memory, or in itself."""
        memory = x if memory is None else memory
        q, k, v = self.linear(x), self.linear(memory), self.linear(memory)
        scores = self.op("product", q, k, shape=(4, 4))
        if mask is not None:
            scores = self.op("add", scores, mask, shape=(4, 4))
        return self.linear(self.op("product", self.op("softmax", scores, shape=(4, 4)), v))

    def ffn(self, x):
        return self.linear(self.op("gelu", self.linear(x, 32), shape=(4, 32)))

    def block(self, x, mask=None):
        """A transformer layer with its norms before."""
        x = self.op("add", x, self.attention(self.norm(x), mask=mask))
        return self.op("add", x, self.ffn(self.norm(x)))

    def graph(self, loss=None):
        return Graph(tuple(self.tensors), tuple(self.ops), loss)


def block_starts(graph):
    return [graph.ops[s.ops[0]].name for s in cluster_layers(graph).blocks]


def transformer(layers, mask=lambda g, i: None):
    g = Builder()
    x = g.embed()
    for i in range(layers):
        x = g.block(x, mask(g, i))
    return g.graph(g.head(x))


# --- any number of layers


@pytest.mark.parametrize("n", range(1, 31))
def test_n_transformer_layers_make_n_groups_with_embedding_in_the_first_and_head_in_the_last(n):
    graph = transformer(n)
    layers = cluster_layers(graph)
    assert layers.count == n
    assert [i for group in layers.groups for i in group] == list(range(len(graph.ops)))
    assert graph.ops[layers.groups[0][0]].type == "embedding"
    assert [graph.ops[i].type for i in layers.groups[-1][-4:]] == ["layer_norm", "matmul", "cross_entropy", "mean"]
    assert len({s.kind for s in layers.blocks}) == 1


HALVES = st.lists(
    st.tuples(st.lists(st.sampled_from(["linear", "unary", "shared", "square"]), min_size=1, max_size=5), st.booleans()),
    min_size=1,
    max_size=3,
).filter(lambda halves: any("linear" in steps for steps, _ in halves))


def write_block(g, x, halves, shared, part):
    """One block of residual or plain halves, of which only the ops in ``part`` are written."""
    position = 0

    def op(kind, *inputs):
        nonlocal position
        position += 1
        if position - 1 not in part:
            return inputs[0]
        params = [g.param(8, 8)] if kind == "linear" else []
        return g.op(f"{kind}{position}", *inputs, *params)

    for steps, residual in halves:
        y = x
        for step in steps:
            y = op(step, y, *{"shared": [shared], "square": [y]}.get(step, []))
        x = op("add", x, y) if residual else y
    return x


@settings(deadline=None)
@given(halves=HALVES, n=st.integers(1, 30), cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_n_random_blocks_make_n_layers_whatever_part_of_a_block_stands_around_them(halves, n, cuts):
    kinds = [kind for steps, residual in halves for kind in [*steps, *["add"] * residual]]
    size = len(kinds)
    kept_before, kept_after = sorted(int(cut * (size - 1)) for cut in cuts)
    parts = kinds[size - kept_before :], kinds[: kept_after - kept_before]
    assume(all(2 * part.count("linear") < kinds.count("linear") for part in parts))  # half a block is a layer too
    g = Builder()
    shared = g.op("make_mask", g.data(4, 8))
    x = write_block(g, g.embed(), halves, shared, range(size - kept_before, size))
    for _ in range(n):
        x = write_block(g, x, halves, shared, range(size))
    write_block(g, x, halves, shared, range(kept_after - kept_before))
    layers = cluster_layers(g.graph())
    assert layers.count == n
    assert [i for group in layers.groups for i in group] == list(range(len(g.ops)))
    if n > 1:
        assert {len(block.ops) for block in layers.blocks} == {size}
        assert len({block.kind for block in layers.blocks}) == 1


def test_a_graph_without_ops_has_no_layers():
    assert cluster_layers(Builder().graph()).count == 0


# --- what is a layer


def test_projections_that_repeat_are_no_layers_because_they_are_not_chained():
    g = Builder()
    x = g.embed()
    heads = [g.linear(x) for _ in range(12)]
    g.op("concat", *heads)
    assert cluster_layers(g.graph()).count == 1


def test_two_linears_in_the_head_are_no_layers():
    g = Builder()
    x = g.block(g.embed())
    g.head(g.op("relu", g.linear(g.op("relu", g.linear(x)))))
    assert cluster_layers(g.graph()).count == 1


def test_two_linears_in_the_head_add_nothing_to_the_layers_before():
    g = Builder()
    x = g.embed()
    for _ in range(4):
        x = g.block(x)
    g.head(g.op("relu", g.linear(g.op("relu", g.linear(x)))))
    assert cluster_layers(g.graph()).count == 4


@pytest.mark.parametrize("n", [2, 3, 7])
def test_the_linears_of_an_mlp_are_its_layers(n):
    g = Builder()
    x = g.data(4, 8)
    for _ in range(n):
        x = g.op("relu", g.op("add", g.linear(x), g.param(8)))
    g.op("mean", g.op("add", g.linear(x), g.param(8)), shape=())
    layers = cluster_layers(g.graph())
    assert layers.count == n
    assert [g.ops[i].type for i in layers.blocks[1].ops] == ["matmul", "add", "relu"]


def test_self_attention_and_cross_attention_of_one_decoder_layer_are_one_layer():
    g = Builder()
    memory = g.norm(g.embed())
    x = g.embed()
    x = g.op("add", x, g.attention(g.norm(x)))
    x = g.op("add", x, g.attention(g.norm(x), memory))
    x = g.op("add", x, g.ffn(g.norm(x)))
    g.head(x)
    assert cluster_layers(g.graph()).count == 1


def encoder_decoder(encoders, decoders):
    g = Builder()
    x = g.embed()
    for _ in range(encoders):
        x = g.block(x)
    memory = g.norm(x)
    x = g.embed()
    for _ in range(decoders):
        x = g.op("add", x, g.attention(g.norm(x)))
        x = g.op("add", x, g.attention(g.norm(x), memory))
        x = g.op("add", x, g.ffn(g.norm(x)))
    return g.graph(g.head(x))


@pytest.mark.parametrize(("encoders", "decoders"), [(2, 2), (3, 4), (6, 2), (2, 12)])
def test_the_layers_of_encoder_and_decoder_follow_each_other(encoders, decoders):
    graph = encoder_decoder(encoders, decoders)
    layers = cluster_layers(graph)
    assert layers.count == encoders + decoders
    kinds = [block.kind for block in layers.blocks]
    assert kinds == [kinds[0]] * encoders + [kinds[-1]] * decoders
    assert kinds[0] != kinds[-1]
    assert "embedding" in {graph.ops[i].type for i in layers.groups[encoders]}


def test_a_first_block_that_differs_is_a_layer_too():
    g = Builder()
    x = g.embed()
    x = g.op("relu", g.block(x))
    for _ in range(3):
        x = g.block(x)
    g.head(x)
    layers = cluster_layers(g.graph())
    assert layers.count == 4
    assert [len(s.ops) for s in layers.blocks] == [16, 14, 14, 14]


def test_an_odd_block_in_the_middle_is_a_layer_too():
    g = Builder()
    x = g.embed()
    for i in range(7):
        x = g.block(x)
        x = g.op("relu", x) if i == 3 else x
    g.head(x)
    assert cluster_layers(g.graph()).count == 7


def test_blocks_that_look_through_different_masks_in_turn_are_equal():
    masks = {}
    graph = transformer(6, lambda g, i: masks.setdefault(i % 2, g.data(4, 4)))
    layers = cluster_layers(graph)
    assert layers.count == 6
    assert len({block.kind for block in layers.blocks}) == 1


# --- where a layer begins


def test_a_block_begins_after_the_residual_addition_of_the_one_before():
    g = Builder()
    # The sum of two embeddings looks like the end of a block, the final norm like the beginning of one.
    x = g.op("add", g.embed(), g.embed())
    for _ in range(3):
        x = g.block(x)
    g.head(x)
    assert block_starts(g.graph()) == ["layer_norm_3", "layer_norm_17", "layer_norm_31"]


def test_a_block_with_its_norms_behind_begins_with_the_projections():
    g = Builder()
    x = g.norm(g.op("add", g.embed(), g.embed()))
    for _ in range(3):
        x = g.norm(g.op("add", x, g.attention(x)))
        x = g.norm(g.op("add", x, g.ffn(x)))
    g.head(x)
    assert [name.split("_")[0] for name in block_starts(g.graph())] == ["matmul"] * 3


# --- what makes layers equal


def test_names_and_scopes_play_no_part():
    graph = transformer(5)
    ops = tuple(dataclasses.replace(op, name=f"o{op.index}", scope=f"/Block_{op.index % 7}/") for op in graph)
    tensors = tuple(dataclasses.replace(t, name=f"t{t.index}", structured_name=f"a.{t.index}") for t in graph.tensors)
    assert cluster_layers(Graph(tensors, ops, graph.loss)) == cluster_layers(graph)


def test_seeds_of_random_ops_play_no_part():
    g = Builder()
    x = g.embed()
    for i in range(3):
        x = g.op("dropout", g.block(x), p=0.1, seed=i)
    assert len({block.kind for block in cluster_layers(g.graph()).blocks}) == 1


def test_attributes_that_mean_something_tell_blocks_apart():
    g = Builder()
    x = g.embed()
    for i in range(6):
        x = g.op("dropout", g.block(x), p=0.1 if i < 3 else 0.2)
    kinds = [block.kind for block in cluster_layers(g.graph()).blocks]
    assert len(kinds) == 6
    assert kinds[0] == kinds[2] != kinds[3] == kinds[5]


def test_a_block_whose_parameters_are_frozen_is_a_layer_of_another_kind():
    g = Builder()
    x = g.embed()
    for i in range(4):
        x = g.op("add", x, g.linear(g.op("relu", x), stop_gradient=i < 2))
    first, second, third, fourth = (block.kind for block in cluster_layers(g.graph()).blocks)
    assert first == second != third == fourth


def test_external_inputs_of_equal_blocks_correspond_in_order():
    mask = {}
    graph = transformer(3, lambda g, i: mask.setdefault(0, g.data(4, 4)))
    blocks = cluster_layers(graph).blocks
    inputs = [external_inputs(graph, block.ops) for block in blocks]
    assert len({tuple(graph.tensors[t].shape for t in row) for row in inputs}) == 1
    assert [row.index(mask[0]) for row in inputs] == [inputs[0].index(mask[0])] * 3
    assert inputs[1][0] == graph.ops[blocks[0].ops[-1]].results[0]
