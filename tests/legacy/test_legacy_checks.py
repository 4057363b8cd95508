"""Partitioned programs that would train another model than the serial one are refused before the first step."""

from __future__ import annotations

from typing import Any

import paddle
import pytest

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.legacy.engine import check_batches

SUM = ("c_allreduce_sum", "X", "Out") if paddle.__version__.startswith("2.") else ("all_reduce", "x", "out")


def program(scope: str, axis: int) -> Any:
    """A sum over ranks, whose result is split along ``axis``."""
    made = paddle.static.Program()
    with paddle.static.program_guard(made):
        x = paddle.static.data("x", [4, 6])
        summed = paddle.scale(x, 1.0)
        block = made.global_block()
        kind, slot, result = SUM
        block.append_op(type=kind, inputs={slot: [summed]}, outputs={result: [summed]}, attrs={"ring_id": 1})
        paddle.split(summed, 2, axis=axis)
    block.ops[-1]._set_attr("op_namescope", scope)
    return made


def test_a_batch_that_is_cut_after_a_sum_is_refused() -> None:
    with pytest.raises(TunerError, match=r"divides the batch of '.*' over ranks that the plan gives the whole batch"):
        check_batches([program("/auto_parallel/reshard", 0)])


@pytest.mark.parametrize(("scope", "axis"), [("/", 0), ("/auto_parallel/reshard", 1)], ids=["the model's", "columns"])
def test_other_splits_of_sums_pass(scope: str, axis: int) -> None:
    check_batches([program(scope, axis)])
