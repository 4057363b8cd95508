"""Ops that change a value in place, in programs that are handed over.

A program in PIR names what an op has changed by a new value. Where the old one is read afterwards, what is read depends on the
order of execution and on who holds the memory: Paddle's own static programs compute something else then than the model does
outside of them, and a distributed program, which moves values between ranks, something else again.
"""

from __future__ import annotations

from typing import Any

from paddle_rbt_plugin.errors import UnsupportedProgram

_CHANGING = frozenset(
    {"fill_", "fill_diagonal_", "fill_diagonal_tensor_", "increment_", "index_add_", "index_put_", "put_along_axis_"}
    | {"scatter_", "set_value_", "set_value_with_tensor_"}
)
"""Ops that change their first operand in static programs as well; of most others with such a name Paddle makes the ones that do
not (``add_`` is ``add``)."""


def check_in_place(program: Any) -> None:
    """Raises UnsupportedProgram for an op that changes a value of a serial forward program which is read again, or which has a
    gradient that the change takes away."""
    ops = program.global_block().ops
    position = {op.id(): i for i, op in enumerate(ops)}
    for i, op in enumerate(ops):
        name = op.name().removeprefix("pd_op.")
        changed = op.operand_source(0) if name in _CHANGING else None
        if changed is None or changed.persistable:
            continue
        read_again = any(position.get(user.id(), -1) > i for user in changed.all_used_ops())
        if read_again or ("set_value" in name and not changed.stop_gradient):
            what = "which is read again afterwards" if read_again else "through which gradients flow"
            raise UnsupportedProgram(
                f"{name} changes a value of the model in place, {what}: static programs do not compute "
                "what the model computes outside of them; write it without changing the value, such as h = h + x, "
                "paddle.where or paddle.concat"
            )
