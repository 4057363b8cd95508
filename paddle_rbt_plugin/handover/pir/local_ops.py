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
from paddle_rbt_plugin.handover.shared.conversion import paddle_mesh, paddle_placements
from paddle_rbt_plugin.handover.shared.custom_ops import LocalForm, operand_of


def build_sample_wise(
    op: Any, name: str, attrs: Mapping[str, Any], inputs: Mapping[str, Sequence[Any]], mesh: ProcessMesh
) -> tuple[list[Any], list[Any]]:
    """Builds again an op that treats samples one by one, on its distributed inputs by slot. ``op`` is the one in the serial
    program. Returns the ops built and the results."""
    described = tuple((slot, tuple(operand_of(v, placement_of(v)) for v in of)) for slot, of in inputs.items())
    results = [v for r in op.results() for v in result_tensors(r)]
    where = local_placements(
        Question(name, tuple(attrs.items()), described), slots_of_results(op), [len(v.shape) for v in results]
    )
    needs, gradients, made = (spelt(some, mesh) for some in (where.needs, where.gradients, where.results))
    form = LocalForm(needs, gradients, made)
    return build_on_local_tensors(form, inputs, paddle_mesh(mesh), lambda local: call_op(name, attrs.items(), local))


def build_on_local_tensors(
    form: LocalForm,
    inputs: Mapping[str, Sequence[Any]],
    target: Any,
    make: Callable[[Mapping[str, list[Any]]], Sequence[Any]],
) -> tuple[list[Any], list[Any]]:
    """Builds an op on the local tensors of distributed inputs by slot; ``make`` builds it and returns its results, and
    ``target`` is the mesh as Paddle's own. Returns the ops built and the results, which are distributed."""
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
    whole = [keep(paddle._C_ops.dtensor_from_local(v, target, p)) for v, p in zip(made, form.results, strict=True)]
    # Another reshard brings their gradients to where they lie.
    return built, [keep(paddle._C_ops.reshard(v, target, p)) for v, p in zip(whole, form.results, strict=True)]


def spelt(placements: Sequence[Placement], mesh: ProcessMesh) -> tuple[Any, ...]:
    """Placements as Paddle's classes."""
    return tuple(paddle_placements(placement, len(mesh.shape)) for placement in placements)
