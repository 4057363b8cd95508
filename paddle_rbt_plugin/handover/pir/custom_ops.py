"""Custom ops in PIR programs: they run on local tensors, see ``handover.shared.custom_ops``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import paddle

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.distributed_ops import placement_of
from paddle_rbt_plugin.graph.names import CanonicalName
from paddle_rbt_plugin.handover.pir.local_ops import build_on_local_tensors
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

    def make(local: Mapping[str, list[Any]]) -> Sequence[Any]:
        return paddle._C_ops._run_custom_op(*arguments(name, list(local.values()), attrs))

    return build_on_local_tensors(form, inputs, target, make)
