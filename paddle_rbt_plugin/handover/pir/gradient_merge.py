"""Accumulation over micro batches: gradients are averaged before anything of the optimizer reads them.

Serially, a batch of ``k`` equal micro batches has the mean of their gradients as its gradient, and clipping, weight decay, loss
scaling and the update all read that mean. Paddle's gradient merge pass, which pipelines use as well, accumulates the sum ``s``
and divides only what the update reads, which is clipped and decayed by then: ``clip(s) / k`` instead of ``clip(s / k)``. It
knows the updates of SGD, Adam and AdamW. For any other optimizer it adds, behind *each* op of the optimizer, a division of
*every* gradient: thousands of ops for a small network, which run after the update and change nothing, so that Momentum seems
to hang. Here each accumulated sum is divided once, in place, right before its first reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import paddle
from paddle.distributed.fleet.meta_optimizers.common import OpRole

from paddle_rbt_plugin.errors import HandoverError
from paddle_rbt_plugin.patching import Attribute, Setting, paddle_change

_BACKWARD, _OPTIMIZE = int(OpRole.Backward), int(OpRole.Optimize)
_RESET = "pd_op.set_value_with_tensor_"
"""What sets a sum back to zero after the update."""


@paddle_change(">=3.0,<3.4")
def averaged_first() -> Iterator[Setting]:
    """Lets Paddle's gradient merge pass average before the optimizer, while it makes a program. A strategy with
    ``gradient_merge.avg = False`` asks for sums, and gets them.

    Reason: the pass divides what the update reads, after clipping and weight decay, and for most optimizers divides each
    gradient behind each op of the optimizer, to no effect.
    """
    from paddle.distributed.passes import auto_parallel_gradient_merge as merge

    yield Attribute(merge, "_pir_append_scale_op", average)


def average(program: Any, params_sums: Sequence[tuple[Any, Any]], steps: int) -> None:
    """Divides each sum of the gradients of ``steps`` micro batches before the first op of the optimizer that reads it.

    Raises HandoverError where the optimizer reads a gradient that is not accumulated."""
    block = program.global_block()
    position = {op.id(): i for i, op in enumerate(block.ops)}
    for _, total in params_sums:
        readers = [op for op in total.all_used_ops() if int(op.op_role) == _OPTIMIZE and op.name() != _RESET]
        if not readers:
            continue
        paddle.pir.set_insertion_point(min(readers, key=lambda op: position[op.id()]))
        mean = paddle._C_ops.scale_(total, 1.0 / steps, 0.0, True)
        division = mean.get_defining_op()
        for op in (division, division.operand_source(1).get_defining_op()):
            op.op_role = _OPTIMIZE
        total.replace_grad_users_with(mean, set(readers))
    paddle.pir.set_insertion_point_to_block_end(block)
    _check_accumulated(block)


def _check_accumulated(block: Any) -> None:
    """Paddle's pass leaves a gradient as it is where an op that it does not know lies between backward and the optimizer."""
    for op in block.ops:
        if int(op.op_role) != _OPTIMIZE:
            continue
        for value in op.operands_source():
            made_by = value.get_defining_op() if value.initialized() else None
            if made_by is not None and int(made_by.op_role) == _BACKWARD:
                raise HandoverError(
                    f"the optimizer's {op.name()} reads the result of {made_by.name()} for the last micro batch only, not "
                    "what all micro batches accumulate; train without accumulation (strategy.gradient_merge, pipelines)"
                )
