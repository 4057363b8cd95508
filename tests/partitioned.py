"""The ops of a program that Paddle has partitioned: the truth that completion is checked against, op for op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddle_rbt_plugin.handover.pir.structure import PHASES

_PLUMBING = ("builtin.", "dist_op.", "pd_op.full_int_array", "pd_op.full", "pd_op.data")


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
