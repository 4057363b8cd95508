"""Batch norms under data parallelism: their statistics are those of the whole batch, and the plan says what that costs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import paddle
import pytest
from launching import WORKERS, launch

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.handover.pir.trace import Trace, trace_layer
from paddle_rbt_plugin.handover.pir.verification import verify

sys.path.insert(0, str(WORKERS))


def traced() -> Trace:
    from batch_norm import BATCH, Network
    from paddle.static import InputSpec
    from steps import WithLoss

    spec = [InputSpec([BATCH, 3, 8, 8], "float32", "images"), InputSpec([BATCH, 1], "int64", "labels")]
    return trace_layer(WithLoss(Network(), paddle.nn.CrossEntropyLoss()), spec)


def test_a_plan_counts_what_is_gathered_and_says_so() -> None:
    trace = traced()
    plan = rbt.tune(trace.program, cluster="1x2:A100-80G", search_space={"dp": 2})
    (comparison,) = verify(plan, trace.graph, trace.program)
    assert comparison.differences == ()
    assert plan.estimate.time["batch_communication"] > 0
    (note,) = [note for note in plan.notes if "batch_norm" in note]
    assert "gathered" in note and "whole batch" in note and "GroupNorm" in note


def test_the_running_statistics_are_changed_in_place() -> None:
    from paddle.distributed.passes.pass_base import PassContext, new_pass

    program = traced().program
    before = [op.name() for op in program.global_block().ops]
    attrs = {"cluster": "1x2:A100-80G", "search_space": {"dp": 2}}
    new_pass("rule_based_tuner", attrs).apply([program], [paddle.static.Program()], PassContext())
    ops = program.global_block().ops
    assert [op.name() for op in ops] == before
    norms = [op for op in ops if op.name() == "pd_op.batch_norm_"]
    assert len(norms) == 4
    for norm in norms:
        statistics = norm.operands_source()[1:3]
        assert all(value.get_defining_op().name() == "builtin.parameter" for value in statistics)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["to_static", "dygraph"])
def test_losses_and_running_statistics_are_the_serial_ones(tmp_path: Path, entry: str) -> None:
    def run(entry: str, processes: int) -> dict[str, Any]:
        (tmp_path / entry).mkdir()
        return launch("batch_norm.py", processes, tmp_path / entry / "out.json", entry)

    serial, parallel = run("serial", 1), run(entry, 2)
    assert parallel["losses"] == pytest.approx(serial["losses"], abs=1e-5)
    assert parallel["statistics"].keys() == serial["statistics"].keys() and len(serial["statistics"]) == 8
    for name, values in serial["statistics"].items():
        assert parallel["statistics"][name] == pytest.approx(values, abs=1e-5), name
