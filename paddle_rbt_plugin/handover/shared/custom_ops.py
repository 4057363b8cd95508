"""Hands over custom ops (``paddle.utils.cpp_extension``) that a plugin has mapped to an op of Paddle.

Paddle refuses a custom op without a sharding rule if an operand is distributed; in PIR it ends the process. The op therefore
runs on the local tensors of a rank: its operands are resharded as the mapped op needs them, and its results are placed like
those of the mapped op. This is what was completed and costed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import paddle.distributed as dist
from paddle.base.framework import OpProtoHolder

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.oracle import Oracle
from paddle_rbt_plugin.completion.question import Operand, Question
from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.graph.graph import Op
from paddle_rbt_plugin.graph.names import CanonicalName, read_as
from paddle_rbt_plugin.graph.pir import dtype_name
from paddle_rbt_plugin.handover.shared.conversion import Placements, paddle_placements

PREFIX = "custom_op."
"""The prefix of custom ops' names in PIR."""


@dataclass(frozen=True)
class LocalForm:
    """How a custom op runs on local tensors, as Paddle's placements: those that it needs of each operand, those of the
    operand's local gradient, and those of each result."""

    needs: tuple[Placements, ...]
    gradients: tuple[Placements, ...]
    results: tuple[Placements, ...]


def local_form(
    name: str,
    attrs: Mapping[str, Any],
    inputs: Mapping[str, Sequence[Operand]],
    mesh: ProcessMesh,
    names: Mapping[str, CanonicalName],
) -> LocalForm:
    """The form of a custom op with these operands by slot. ``names`` maps custom ops to ops of Paddle, as plugins say.

    Raises UnsupportedProgram for an op that no plugin has mapped, and for one whose results are partial sums."""
    canonical = names.get(name)
    if canonical is None:
        raise UnsupportedProgram(
            f"no plugin says what the custom op {name!r} computes, so its sharding is unknown; map it to an op of Paddle with "
            "the hook register_op_names"
        )
    operands = [operand for slot in inputs.values() for operand in slot]
    places = iter(range(len(operands)))
    op = read_as(
        Op(0, name, name, {slot: tuple(next(places) for _ in of) for slot, of in inputs.items()}, {}, attrs), canonical
    )
    slots = tuple((slot, tuple(operands[i] for i in of)) for slot, of in op.inputs.items())
    built = _oracle(mesh).forward(Question(op.type, tuple(op.attrs.items()), slots))
    made = [product.made for product in built.products]
    if any(placement.partial for placement in made):
        raise UnsupportedProgram(
            f"the custom op {name!r}, treated as {op.type!r}, would return partial sums, which local tensors cannot represent"
        )
    axes = len(mesh.shape)
    needs = [operand.placement for operand in operands]
    for use in built.uses:
        needs[use.source.index] = use.need
    divided = {axis for p in (*made, *needs) for axis in p.dims_mapping}
    here = tuple(paddle_placements(need, axes) for need in needs)
    gradients = tuple(
        [dist.Partial() if p.is_replicated() and axis in divided else p for axis, p in enumerate(need)] for need in here
    )
    return LocalForm(here, gradients, tuple(paddle_placements(placement, axes) for placement in made))


@cache
def _oracle(mesh: ProcessMesh) -> Oracle:
    return Oracle(mesh)


def input_names(name: str) -> list[str]:
    """The operand slots of a custom op, in order."""
    return [slot.name for slot in OpProtoHolder.instance().get_op_proto(name).inputs]


def attribute_names(name: str) -> list[str]:
    """The attributes of a custom op, in the order of its arguments, which follow the operands."""
    return [a.name for a in OpProtoHolder.instance().get_op_proto(name).attrs if not a.extra]


def arguments(name: str, operands: Sequence[Sequence[Any]], attrs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a custom op, from the operands of each slot and the attributes."""
    slots = OpProtoHolder.instance().get_op_proto(name).inputs
    given = [list(of) if slot.duplicable else next(iter(of), None) for slot, of in zip(slots, operands, strict=True)]
    return [name, *given, *(attrs[attribute] for attribute in attribute_names(name))]


def operand_of(value: Any, placement: Any) -> Operand:
    """A value or a tensor as an operand of a question to the oracle."""
    return Operand(tuple(value.shape), dtype_name(value.dtype), placement, bool(value.stop_gradient))
