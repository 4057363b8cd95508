"""What the program that a plan is handed over as really holds, beside what the cost model computed with.

The serial program is annotated, Paddle adds the backward pass and the optimizer, partitions it and resolves its reshards, all
for one rank in this process, without a device. From the result come the collectives (phase, kind, axis, bytes), the local
bytes of parameters, gradients and optimizer states, and the FLOP of the local matrix products; from the completion come the
predictions of all of these. ``compare`` lists every difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import paddle
from paddle.base.framework import auto_complete_op_role
from paddle.distributed.auto_parallel.static.engine import set_all_ops_op_role
from paddle.distributed.auto_parallel.static.mix_to_dist_pass import apply_mix2dist_pass
from paddle.distributed.auto_parallel.static.pir_pass import ReshardPasses, apply_partition_pass
from paddle.distributed.auto_parallel.static.process_group import get_process_group
from paddle.distributed.fleet.meta_optimizers.common import OpRole

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion import Completion
from paddle_rbt_plugin.cost.compute import products
from paddle_rbt_plugin.cost.memory import OPTIMIZER_STATES
from paddle_rbt_plugin.cost.sizes import Sizes
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.graph import DTYPE_BYTES, Graph
from paddle_rbt_plugin.graph.pir import dtype_name
from paddle_rbt_plugin.handover.replay import annotate
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import analyse

PHASES = {0: "forward", 1: "backward", 2: "optimizer"}
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

FIGURES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "matmul_flop")
"""The single numbers of a structure."""

Collectives = Mapping[tuple[str, str, str, int], int]
"""How often each (phase, kind, axis, bytes of the message) occurs."""


@dataclass(frozen=True)
class Structure:
    """What one rank holds and does in a step of one micro batch."""

    collectives: Collectives
    parameter_bytes: int
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    matmul_flop: float = 0.0
    local_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of every parameter, by name."""


def predicted(graph: Graph, completion: Completion, train: bool = True) -> Structure:
    """The structure that the cost model computes with, in the precision of the traced program; ``graph`` is the one that was
    completed, rewritten where it was rewritten."""
    mesh = completion.mesh
    collectives: Counter[tuple[str, str, str, int]] = Counter()
    sizes = Sizes(mesh, 1.0, "fp32")
    flop, nbytes = 0.0, 0
    for work in completion.work:
        kernels = (*work.forward, *work.backward)
        for c in (*(c for k in kernels for c in k.collectives), *work.gradient_syncs):
            collectives[(c.phase, c.kind, c.axis, c.value.local_bytes(mesh, 1))] += 1
        flop += sum(p.flop for k in kernels for p in products(k, sizes))
        nbytes += sum(v.local_bytes(mesh, 1) for v in work.params)
    shapes = {
        t.name: completion.placements[t.index].local_shape(t.shape, mesh) for t in graph.params if graph.consumers(t.index)
    }
    states = nbytes * OPTIMIZER_STATES["adamw"]
    return Structure(collectives, nbytes, nbytes if train else 0, states if train else 0, flop, shapes)


def partition(program: Any, train: bool = True) -> list[Any]:
    """Completes an annotated forward program for training with AdamW, or for evaluation, and partitions it, in place;
    returns its pairs of parameter and gradient."""
    gradients: list[Any] = []
    paddle.enable_static()
    try:
        apply_mix2dist_pass(program)
        set_all_ops_op_role(program.global_block(), OpRole.Forward)
        if train:
            loss = [op for op in program.global_block().ops if op.num_results()][-1].result(0)
            startup = paddle.static.Program()
            optimizer = paddle.optimizer.AdamW(1e-3)
            with paddle.static.program_guard(program, startup):
                with auto_complete_op_role(program, OpRole.Backward):
                    gradients = paddle.autograd.ir_backward.append_backward(loss)
                with auto_complete_op_role(program, OpRole.Optimize):
                    optimizer._apply_optimize(loss, startup, params_grads=gradients)
            apply_mix2dist_pass(program)
        apply_partition_pass(program)
    finally:
        paddle.disable_static()
    return gradients


def handed_over(program: Any, gradients: list[Any], mesh: ProcessMesh) -> Structure:
    """The structure of a partitioned program; its reshards are resolved in place."""
    shapes, nbytes, states = {}, 0, 0
    updated = [op for op in program.global_block().ops if op.name() == "pd_op.adamw_"]
    for op in updated:
        slots = dict(zip(op.get_input_names(), op.operands_source(), strict=True))
        states += _local_bytes(slots["moment1"]) + _local_bytes(slots["moment2"])
    moments = {v.id for op in updated for v in op.operands_source()[3:] if v.initialized()}
    for op in program.global_block().ops:
        if op.name() == "builtin.parameter" and op.result(0).id not in moments:
            shapes[op.attrs()["parameter_name"]] = tuple(op.result(0)._local_shape)
            nbytes += _local_bytes(op.result(0))
    paddle.enable_static()
    try:
        ReshardPasses.apply_reshard_pass(program, gradients)
    finally:
        paddle.disable_static()
    updates = [dict(zip(op.get_input_names(), op.operands_source(), strict=True)) for op in updated]
    gradient_bytes = sum(_local_bytes(slots["grad"]) for slots in updates)
    return Structure(_collectives(program, mesh), nbytes, gradient_bytes, states, _matmul_flop(program), shapes)


def compare(expected: Structure, found: Structure) -> list[str]:
    """What differs, in sentences; empty where the prediction is the program."""
    lines = []
    for key in sorted(set(expected.collectives) | set(found.collectives)):
        predicted_count, count = expected.collectives.get(key, 0), found.collectives.get(key, 0)
        if predicted_count != count:
            phase, kind, axis, nbytes = key
            lines.append(f"{phase} {kind} along {axis} of {nbytes} bytes: predicted {predicted_count}, in the program {count}")
    for name in FIGURES:
        a, b = getattr(expected, name), getattr(found, name)
        if a != b:
            lines.append(f"{name.replace('_', ' ')}: predicted {a:,.0f}, in the program {b:,.0f}")
    for name in sorted(set(expected.local_shapes) | set(found.local_shapes)):
        shape, real = expected.local_shapes.get(name), found.local_shapes.get(name)
        if shape != real:
            lines.append(f"parameter {name}: predicted local shape {shape}, in the program {real}")
    return lines


def verify(plan: Plan, graph: Graph, program: Any) -> tuple[Structure, Structure, list[str]]:
    """The prediction for a plan, what its program holds, and the differences. ``program`` is the serial program that
    ``graph`` was read from; it is annotated and partitioned in place.

    Raises PlanError for a plan of another program, TunerError for one with pipeline stages."""
    if plan.degrees["pp"] > 1:
        raise TunerError(f"the plan has {plan.degrees['pp']} pipeline stages; a plan of one stage can be verified")
    leaves = {name: t.placement for name, t in plan.leaves(graph).items()}
    mesh = plan.stages[0].process_mesh
    analysis = analyse(graph, load_plugins().patterns)
    annotate(program, mesh, leaves)
    expected, found = predicted(analysis.graph, analysis.complete(mesh)), handed_over(program, partition(program), mesh)
    return expected, found, compare(expected, found)


def _collectives(program: Any, mesh: ProcessMesh) -> Collectives:
    axis_of = {tuple(sorted(group)): axis for axis in mesh.axes for group in mesh.groups(axis)}
    count: Counter[tuple[str, str, str, int]] = Counter()
    for op in program.global_block().ops:
        kind = op.name().removeprefix("pd_op.").removesuffix("_")
        if kind in _COLLECTIVES:
            ranks = tuple(sorted(get_process_group(op.int_attr("ring_id")).ranks))
            message = op.result(0) if kind == "all_gather" else op.operand_source(0)
            count[(PHASES[op.op_role], kind, axis_of[ranks], _local_bytes(message))] += 1
    return count


def _matmul_flop(program: Any) -> float:
    """A product of m x k by k x n is 2 m n k; its gradient is two products of as many, or one where one is not wanted."""
    total = 0.0
    for op in program.global_block().ops:
        if op.name() not in ("pd_op.matmul", "pd_op.matmul_grad"):
            continue
        x = _local_shape(op.operand_source(0))
        inner = x[-2] if op.attrs()["transpose_x"] else x[-1]
        backward = op.name() == "pd_op.matmul_grad"
        out = _local_shape(op.operand_source(2) if backward else op.result(0))
        wanted = sum(r.initialized() for r in op.results()) if backward else 1
        total += 2.0 * wanted * prod(out) * inner
    return total


def _local_shape(value: Any) -> tuple[int, ...]:
    return tuple(value._local_shape if value.is_dist() else value.shape)


def _local_bytes(value: Any) -> int:
    return prod(_local_shape(value)) * DTYPE_BYTES[dtype_name(value.dtype)]
