"""Paddle's own way from an annotated forward program to the partitioned training program, and what it then holds.

This is the truth that completion is checked against: nothing here comes from the package but the placements put in.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.base.framework import auto_complete_op_role
from paddle.distributed.auto_parallel.static.engine import set_all_ops_op_role
from paddle.distributed.auto_parallel.static.mix_to_dist_pass import apply_mix2dist_pass
from paddle.distributed.auto_parallel.static.pir_pass import ReshardPasses, apply_partition_pass
from paddle.distributed.auto_parallel.static.process_group import get_process_group
from paddle.distributed.fleet.meta_optimizers.common import OpRole

from paddle_rbt_plugin.cluster import ProcessMesh

PHASES = {0: "forward", 1: "backward", 2: "optimizer"}
_PLUMBING = ("builtin.", "dist_op.", "pd_op.full_int_array", "pd_op.full", "pd_op.data")


def partition(program: Any, parameters: list[Any], loss_index: int = -1) -> tuple[Any, list[Any]]:
    """Adds backward pass and AdamW to an annotated forward program and partitions it, in place; returns it with its
    gradients."""
    paddle.enable_static()
    try:
        loss = [op for op in program.global_block().ops if op.num_results()][loss_index].result(0)
        apply_mix2dist_pass(program)
        set_all_ops_op_role(program.global_block(), OpRole.Forward)
        startup = paddle.static.Program()
        optimizer = paddle.optimizer.AdamW(1e-3, parameters=parameters)
        with paddle.static.program_guard(program, startup):
            with auto_complete_op_role(program, OpRole.Backward):
                gradients = paddle.autograd.ir_backward.append_backward(loss)
            with auto_complete_op_role(program, OpRole.Optimize):
                optimizer._apply_optimize(loss, startup, params_grads=gradients)
        apply_mix2dist_pass(program)
        apply_partition_pass(program)
    finally:
        paddle.disable_static()
    return program, gradients


@dataclass(frozen=True)
class PartitionedOp:
    """One op: its phase, type and where its operands and results lie, each spelt like ``S0,R``."""

    phase: str
    type: str
    operands: tuple[str, ...]
    results: tuple[str, ...]


def spell(placements: Any) -> str:
    return ",".join(f"S{p.get_dim()}" if p.is_shard() else "P" if p.is_partial() else "R" for p in placements)


def _tensors(values: Any) -> list[Any]:
    flat = []
    for v in values:
        if not v.initialized():
            continue
        if v.is_combine():
            op = v.get_defining_op()
            parts = op.operands_source() if op.name() == "builtin.combine" else v.all_used_ops()[0].results()
            flat += list(parts)
        elif v.is_dist():
            flat.append(v)
    return flat


def computing_ops(program: Any) -> list[PartitionedOp]:
    """The ops that compute, constants and their operands left out."""
    found = []
    for op in program.global_block().ops:
        if op.name().startswith(_PLUMBING) and op.name() != "pd_op.full_like":
            continue
        operands = [
            spell(v.dist_attr().placements)
            for v in _tensors(op.operands_source())
            if v.get_defining_op().name() not in ("pd_op.full_int_array", "pd_op.full")
        ]
        results = [spell(v.dist_attr().placements) for v in _tensors(op.results())]
        name = op.name().split(".", 1)[1].removesuffix("_")
        found.append(PartitionedOp(PHASES.get(op.op_role, "forward"), name, tuple(operands), tuple(results)))
    return found


_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def collectives(program: Any, gradients: list[Any], mesh: ProcessMesh) -> Counter[tuple[str, str, str, int]]:
    """Per (phase, kind, axis, elements of the message) how often the program communicates once its reshards are resolved."""
    paddle.enable_static()
    try:
        ReshardPasses.apply_reshard_pass(program, gradients)
    finally:
        paddle.disable_static()
    axis_of = {tuple(sorted(group)): axis for axis in mesh.axes for group in mesh.groups(axis)}
    count: Counter[tuple[str, str, str, int]] = Counter()
    for op in program.global_block().ops:
        kind = op.name().removeprefix("pd_op.").removesuffix("_")
        if kind not in _COLLECTIVES:
            continue
        ranks = tuple(sorted(get_process_group(op.int_attr("ring_id")).ranks))
        message = op.result(0) if kind == "all_gather" else op.operand_source(0)
        elements = 1
        for n in message._local_shape if message.is_dist() else message.shape:
            elements *= n
        count[(PHASES[op.op_role], kind, axis_of[ranks], elements)] += 1
    return count
