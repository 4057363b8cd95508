"""One completion for many meshes is what completing on each of them gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from searching import gpt_analysis

from paddle_rbt_plugin.cluster import ProcessMesh
from paddle_rbt_plugin.completion import make_oracle
from paddle_rbt_plugin.handover.pir.configs import config_graph
from paddle_rbt_plugin.models import GPTConfig, LlamaConfig
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import analyse

MODELS = {
    "gpt": GPTConfig(layers=2, hidden=64, ffn=256, heads=8, vocab=512, seq=32),
    "llama, grouped": LlamaConfig(layers=2, hidden=64, ffn=256, heads=8, kv_heads=2, vocab=512, seq=32),
}


def mesh_of(**degrees: int) -> ProcessMesh:
    kept = {axis: n for axis, n in degrees.items() if n > 1} or {"dp": 1}
    size = 1
    for n in kept.values():
        size *= n
    return ProcessMesh(tuple(kept), tuple(kept.values()), tuple(range(size)))


def described(completion):
    """Everything but attributes, which may name the rank."""
    return [
        [
            [(k.type, k.inputs, k.outputs, k.collectives) for k in (*work.forward, *work.backward)],
            work.params,
            work.gradient_syncs,
            work.saved,
        ]
        for work in completion.work
    ]


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("degrees", [{"mp": 4}, {"mp": 8}, {"dp": 4, "mp": 4}, {"mp": 4, "dp": 3}, {"dp": 6, "mp": 8}])
def test_a_shared_completion_is_that_of_the_mesh_itself(model, degrees) -> None:
    graph = config_graph(MODELS[model], 24)
    analysis = analyse(graph, load_plugins(()).patterns)
    mesh = mesh_of(**degrees)
    shared = analysis.complete(mesh)
    assert shared.mesh == mesh
    assert described(shared) == described(analysis._completion(mesh))
    assert shared.placements == analysis._completion(mesh).placements


def test_meshes_that_differ_in_degrees_share_one_completion() -> None:
    analysis = replace(gpt_analysis(2, 24), _completions={})
    works = {id(analysis.complete(mesh_of(dp=dp, mp=mp)).work) for dp in (2, 3, 6) for mp in (2, 4, 8)}
    assert len(works) == 2  # dp is divided by 2, or by 3 only


@pytest.mark.parametrize("model", list(MODELS))
def test_one_device_is_completed_by_the_answers_for_two_as_by_its_own(model) -> None:
    analysis = analyse(config_graph(MODELS[model], 24), load_plugins(()).patterns)
    asked_itself = replace(analysis, _completions={}, _memos={}, _oracles={})
    one = mesh_of()
    asked_itself._oracles[("dp",), (2,)] = make_oracle(one)
    assert described(analysis.complete(one)) == described(asked_itself.complete(one))
