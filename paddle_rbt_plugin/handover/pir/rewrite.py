"""Builds the ops that stand for an op of the serial program: the op itself, or its replacement by ``graph.rewrite`` and
``completion.forms``. What was matched, completed and costed is therefore what is executed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.distributed.auto_parallel.static.process_group import new_process_group

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.distributed_ops import call_op, finished, made_by, placement_of, producer_of, set_placement
from paddle_rbt_plugin.completion.forms import sharded_form
from paddle_rbt_plugin.completion.operands import less_sharded, whole_along, wrongly_summed
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.graph.graph import TensorKind
from paddle_rbt_plugin.graph.pir import LINEAR, dtype_name
from paddle_rbt_plugin.graph.rewrite import RULES, steps_for
from paddle_rbt_plugin.graph.steps import Step
from paddle_rbt_plugin.handover.shared.conversion import paddle_placements

_KINDS: Mapping[str, TensorKind] = {"builtin.parameter": "param", "pd_op.data": "data"}


@dataclass(frozen=True)
class SerialOp:
    """An op of the serial program that is built again on a mesh."""

    name: str
    attrs: Mapping[str, Any]
    result: Any
    """Its first result in the serial program."""
    mesh: ProcessMesh
    forms: Collection[str] = ()
    """The ops that may take another form (``completion.forms``)."""


Inputs = Mapping[str, Sequence[Any]]
"""Distributed values by slot."""


def build_op(op: SerialOp, inputs: Inputs) -> list[Any]:
    """Builds the ops that stand for ``op`` in the current program. Returns them; the last one has the results of ``op``. If
    Paddle cannot build the op correctly on its operands as they are sharded, it is built on less sharded ones
    (``completion.operands``).

    Raises UnsupportedProgram for an op that the installed Paddle does not list."""
    values = [v for of in inputs.values() for v in of]
    given = [placement_of(v) for v in values]
    try:
        built = _build(op, inputs)
    except UnsupportedProgram:
        raise
    except Exception:  # Paddle's own exceptions have no common base
        others = less_sharded(given)
        if not others:
            raise
    else:
        axes = wrongly_summed(built[-1].name().split(".", 1)[1], made_by(built[-1]))
        if not axes:
            return built
        others = [whole_along(given, axes)]
        for wrong in reversed(built):
            wrong.erase()

    def built_on(placements: Sequence[Placement]) -> list[Any]:
        brought = [_brought(v, p) for v, p in zip(values, placements, strict=True)]
        moves = [v.get_defining_op() for v, old in zip(brought, values, strict=True) if v is not old]
        remaining = iter(brought)
        try:
            return [*moves, *_build(op, {slot: [next(remaining) for _ in of] for slot, of in inputs.items()})]
        except Exception:
            for move in moves:
                move.erase()
            raise

    *tries, last = others
    for placements in tries:
        with suppress(Exception):
            return built_on(placements)
    return built_on(last)


def _brought(value: Any, placement: Placement) -> Any:
    if placement == placement_of(value):
        return value
    mesh = value.process_mesh
    return paddle._C_ops.reshard(value, mesh, paddle_placements(placement, len(mesh.shape)))


def _build(op: SerialOp, inputs: Inputs) -> list[Any]:
    name, attrs, mesh = op.name, op.attrs, op.mesh
    if name == LINEAR:  # the graph reads it as these two
        product = call_op(
            "matmul",
            [("transpose_x", False), ("transpose_y", attrs["transpose_weight"])],
            {"x": inputs["input"], "y": inputs["weight"]},
        )
        total = call_op("add", (), {"x": [finished(product[0])], "y": inputs["bias"]})
        return [producer_of(product[0]), producer_of(total[0])]
    if name in RULES:
        operands = [value for values in inputs.values() for value in values]
        kinds = [_KINDS.get(value.get_defining_op().name(), "var") for value in operands]
        wholes = [tuple(value.shape) for value in operands]
        steps = steps_for(name, kinds, wholes, tuple(op.result.shape), attrs, dtype_name(operands[0].dtype))
        if steps:
            return _build_steps(steps, operands)
    if name in op.forms:
        first = {slot: values[0] for slot, values in inputs.items() if values}
        shapes = {slot: tuple(value.shape) for slot, value in first.items()}
        placements = {slot: placement_of(value) for slot, value in first.items()}
        rank = rank_on(mesh)
        form = sharded_form(name, attrs, shapes, placements, mesh, rank)
        name, attrs = form.type, form.attrs
        inputs = {form.slots.get(slot, slot): values for slot, values in inputs.items()}
        if form.axis is not None:
            attrs = {**attrs, "ring_id": _ring(mesh, form.axis, rank)}
    return [producer_of(call_op(name, attrs.items(), inputs)[0])]


def _build_steps(steps: Sequence[Step], operands: Sequence[Any]) -> list[Any]:
    values: list[Any] = []
    for step in steps:
        inputs = {slot: [operands[-1 - ref] if ref < 0 else values[ref]] for slot, ref in step.inputs.items()}
        (value,) = call_op(step.type, step.attrs.items(), inputs)
        value.stop_gradient = all(read.stop_gradient for (read,) in inputs.values())
        if not step.inputs and operands[0].is_dist():
            set_placement(value, operands[0].process_mesh, Placement.replicated(len(value.shape)))
        values.append(finished(value))
    return [producer_of(value) for value in values]


def _ring(mesh: ProcessMesh, axis: str, rank: int) -> int:
    """The communication group of ``rank`` along an axis. Every rank makes one here, so that all count their groups alike."""
    group = next(group for group in mesh.groups(axis) if rank in group)
    return int(new_process_group(sorted(group)).id)


def rank_on(mesh: ProcessMesh) -> int:
    """The rank whose program is built; the mesh's first where this process is none of its ranks, as in planning."""
    rank = int(paddle.distributed.get_rank())
    return rank if rank in mesh.ranks else mesh.ranks[0]
