"""Ops that each rank runs on its local tensors: custom ops (``custom_ops``), and those that Paddle cannot build on distributed
operands (``completion.sample_wise``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import paddle

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.distributed_ops import call_op, placement_of, producer_of, result_tensors, slots_of_results
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.question import Question
from paddle_rbt_plugin.completion.sample_wise import local_placements
from paddle_rbt_plugin.graph.pir import argument_kinds
from paddle_rbt_plugin.handover.shared.conversion import paddle_mesh, paddle_placements
from paddle_rbt_plugin.handover.shared.custom_ops import LocalForm, operand_of


def build_sample_wise(
    op: Any, name: str, attrs: Mapping[str, Any], inputs: Mapping[str, Sequence[Any]], mesh: ProcessMesh
) -> tuple[list[Any], list[Any]]:
    """Builds again an op that treats samples one by one, on its distributed inputs by slot. ``op`` is the one in the serial
    program. Returns the ops built and the results."""
    kinds = argument_kinds(op.name())
    constants = {slot: of for slot, of in inputs.items() if kinds.get(slot) == "constant"}
    tensors = {slot: of for slot, of in inputs.items() if slot not in constants}
    described = tuple((slot, tuple(operand_of(v, placement_of(v)) for v in of)) for slot, of in tensors.items())
    results = [v for r in op.results() for v in result_tensors(r)]
    where = local_placements(
        Question(name, tuple(attrs.items()), described), slots_of_results(op), [len(v.shape) for v in results]
    )
    needs, gradients, made = (spelt(some, mesh) for some in (where.needs, where.gradients, where.results))
    form = LocalForm(needs, gradients, made)
    read = [not v.use_empty() for v in results]
    return build_on_local_tensors(
        form, tensors, paddle_mesh(mesh), lambda local: call_op(name, attrs.items(), {**constants, **local}), read
    )


def build_on_local_tensors(
    form: LocalForm,
    inputs: Mapping[str, Sequence[Any]],
    target: Any,
    make: Callable[[Mapping[str, list[Any]]], Sequence[Any]],
    read: Sequence[bool] | None = None,
) -> tuple[list[Any], list[Any]]:
    """Builds an op on the local tensors of distributed inputs by slot; ``make`` builds it and returns its results, and
    ``target`` is the mesh as Paddle's own. Returns the ops built and the results. Those that are ``read``, by default all, are
    distributed; the scratch space of a kernel is not, and has no size that could be."""
    built: list[Any] = []

    def keep(value: Any) -> Any:
        built.append(value.get_defining_op())
        return value

    places = iter(zip(form.needs, form.gradients, strict=True))

    def local(value: Any) -> Any:
        need, gradient = next(places)
        there = keep(paddle._C_ops.reshard(value, target, need))
        return keep(paddle._C_ops.dtensor_to_local(there, target, gradient))

    made = make({slot: [local(value) for value in of] for slot, of in inputs.items()})
    built.append(producer_of(made[0]))

    def distributed(value: Any, placements: Any) -> Any:
        whole = keep(paddle._C_ops.dtensor_from_local(value, target, placements))
        return keep(paddle._C_ops.reshard(whole, target, placements))  # it brings the gradient to where the value lies

    is_read = read or [True] * len(made)
    return built, [distributed(v, p) if r else v for v, p, r in zip(made, form.results, is_read, strict=True)]


def spelt(placements: Sequence[Placement], mesh: ProcessMesh) -> tuple[Any, ...]:
    """Placements as Paddle's classes."""
    return tuple(paddle_placements(placement, len(mesh.shape)) for placement in placements)
