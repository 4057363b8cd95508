"""The built-in patterns on every model of the zoo: what an expert would shard is sharded, once, and within one block."""

from __future__ import annotations

from functools import cache

import pytest
from gathers import MESH, gathers
from zoo import ZOO, graph

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.pattern.coverage import coverage, table
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import Analysis, analyse

# The heads of BERT and ViT make one prediction per sequence, and a patch embedding is a convolution: whole on purpose.
WHOLE_BEFORE = {"ViT"}
WHOLE_BEHIND = {"BERT", "ViT"}
EVERY_MODEL = pytest.mark.parametrize("name", ZOO)
MESHES = {
    "mp2": ProcessMesh(("mp",), (2,), (0, 1)),
    "mp4": ProcessMesh(("mp",), (4,), (0, 1, 2, 3)),
    "dp2 x mp2": ProcessMesh(("dp", "mp"), (2, 2), (0, 1, 2, 3)),
}


@cache
def analysis(name: str) -> Analysis:
    return analyse(graph(name), load_plugins().patterns)


def covered(name: str):
    found = analysis(name)
    return coverage(found.graph, found.layers, found.matches)


@EVERY_MODEL
def test_nearly_all_bytes_of_the_blocks_are_sharded(name):
    assert covered(name).share("block") >= 0.95


@EVERY_MODEL
def test_the_word_embedding_and_the_head_are_sharded(name):
    found = covered(name)
    assert name in WHOLE_BEFORE or found.share("before") >= 0.85
    assert name in WHOLE_BEHIND or found.share("after") >= 0.95


@EVERY_MODEL
def test_every_parameter_is_some_patterns_business(name):
    assert not covered(name).whole("")
    assert not analysis(name).unmatched


@EVERY_MODEL
def test_no_tensor_is_claimed_in_two_ways(name):
    specs = {}
    for match in analysis(name).matches.matches:
        for tensor, spec in match.specs.items():
            assert specs.setdefault(tensor, spec) == spec


@EVERY_MODEL
def test_no_weight_is_sharded_by_two_matches(name):
    found = analysis(name)
    weights = [
        t
        for m in found.matches.matches
        if m.pattern != "relative_position_bias"  # one table, whose bias every layer adds
        for t, s in m.specs.items()
        if any(s) and found.graph.tensors[t].kind == "param"
    ]
    tied = {t for t in weights if len(found.graph.consumers(t)) > 1}  # a tied embedding may be looked up twice
    single = [t for t in weights if t not in tied]
    assert len(single) == len(set(single))


@EVERY_MODEL
def test_no_match_crosses_two_blocks(name):
    found = analysis(name)
    block_of = {op: i for i, block in enumerate(found.layers.blocks) for op in block.ops}
    for match in found.matches.matches:
        own = {block_of[op] for op in match.ops if op in block_of}
        params = [t for t in match.specs if found.graph.tensors[t].kind == "param" and any(match.specs[t])]
        shared = any(len({block_of.get(op.index) for op in found.graph.consumers(t)}) > 1 for t in params)
        assert len(own) <= 1 or shared or match.pattern in ("relative_position_bias", "attention_mask"), match


@EVERY_MODEL
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_completion_keeps_what_the_patterns_ask_for(name, mesh):
    found = analysis(name)
    assert not found.indivisible(dict(zip(mesh.axes, mesh.shape, strict=True)))
    assert not found.lost_sharding(found.complete(mesh))


# What Paddle gathers for want of a better rule, per pass over the model: see the docstrings of the patterns.
GATHERED = {"cross_entropy_with_softmax", "reshape", "split_with_num", "matmul_grad", "mean_grad", "concat_grad"}
FUSED = {"ViT", "Qwen", "Multi-query", "DeepSeek"}  # and the gradients of a head that all ranks share


@EVERY_MODEL
def test_nothing_is_gathered_in_the_blocks_but_fused_projections(name):
    found = analysis(name)
    work = found.complete(MESHES["dp2 x mp2"]).work
    blocks = [w for w, segment in zip(work, found.layers.segments, strict=True) if segment.is_block]
    gathers = {
        kernel.type
        for w in blocks
        for kernel in (*w.forward, *w.backward)
        for c in kernel.collectives
        if c.kind != "all_reduce"
    }
    assert gathers == set() or (name in FUSED and gathers <= GATHERED)


@pytest.mark.parametrize(("name", "op"), [("LLaMA-3", "expand"), ("Qwen", "repeat_interleave"), ("Mixtral", "tile_grad")])
def test_ops_that_give_shardings_up_are_rewritten(name, op):
    written = analyse(graph(name), load_plugins().patterns, rewrite=False)
    before, after = gathers(written.complete(MESH)), gathers(analysis(name).complete(MESH))
    assert before[op] > 0 == after[op]
    assert after.total() < before.total()


def test_the_table_names_every_model_and_what_it_keeps_whole():
    text = table((name, covered(name)) for name in ("GPT-2", "BERT"))
    assert "| GPT-2 | 9" in text and "counted_positions: 1 parameter, 4,096 bytes, whole on purpose" in text
    assert "pooler" in text.splitlines()[-1]


def test_experts_are_planned_on_an_axis_of_their_own():
    mesh = ProcessMesh(("dp", "ep"), (2, 4), tuple(range(8)))
    found = analysis("Mixtral")
    completion = found.complete(mesh)
    assert not found.lost_sharding(completion)
    experts = [t for t in found.graph.params if t.ndim == 3]
    assert len(experts) == 6
    assert all(completion.placements[t.index].dims_mapping == (1, -1, -1) for t in experts)
    forward = {c.kind for w in completion.work for k in w.forward for c in k.collectives if c.axis == "ep"}
    assert forward == {"all_reduce"}, "the experts' results are summed, and nothing else is communicated"
