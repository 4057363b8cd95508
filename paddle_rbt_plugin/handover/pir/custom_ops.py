"""Custom ops in PIR programs: they run on local tensors, see ``handover.shared.custom_ops``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import paddle

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.distributed_ops import placement_of
from paddle_rbt_plugin.graph.names import CanonicalName
from paddle_rbt_plugin.handover.shared.custom_ops import arguments, local_form, operand_of


def build_custom_op(
    name: str,
    attrs: Mapping[str, Any],
    inputs: Mapping[str, Sequence[Any]],
    mesh: ProcessMesh,
    target: Any,
    names: Mapping[str, CanonicalName],
) -> tuple[list[Any], list[Any]]:
    """Builds a custom op in the current program on its distributed inputs by slot; ``target`` is the mesh as Paddle's own,
    and ``names`` are those that plugins give custom ops.
    Returns the ops built and the results. Raises UnsupportedProgram as ``local_form`` does."""
    pir = paddle.base.libpaddle.pir
    where = pir.get_current_insertion_point()
    described = {slot: [operand_of(v, placement_of(v)) for v in of] for slot, of in inputs.items()}
    form = local_form(name, attrs, described, mesh, names)
    pir.set_insertion_point(where)
    built: list[Any] = []

    def keep(value: Any) -> Any:
        built.append(value.get_defining_op())
        return value

    places = iter(zip(form.needs, form.gradients, strict=True))

    def local(value: Any) -> Any:
        need, gradient = next(places)
        there = keep(paddle._C_ops.reshard(value, target, need))
        return keep(paddle._C_ops.dtensor_to_local(there, target, gradient))

    operands = [[local(value) for value in of] for of in inputs.values()]
    made = paddle._C_ops._run_custom_op(*arguments(name, operands, attrs))
    built.append(made[0].get_defining_op())
    whole = [keep(paddle._C_ops.dtensor_from_local(v, target, p)) for v, p in zip(made, form.results, strict=True)]
    # Another reshard brings their gradients to where they lie.
    return built, [keep(paddle._C_ops.reshard(v, target, p)) for v, p in zip(whole, form.results, strict=True)]
