"""Batch norms under data parallelism: the batch stays divided, and their statistics are those of all of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from launching import WORKERS, launch

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.cluster import ProcessMesh
from paddle_rbt_plugin.completion.synchronised import BACKWARD_TRAFFIC, FORWARD_TRAFFIC, SUMS
from paddle_rbt_plugin.cost.compute import KernelTable
from paddle_rbt_plugin.cost.fusion import Traffic
from paddle_rbt_plugin.cost.sizes import Columns, Values
from paddle_rbt_plugin.handover.pir.trace import Trace, trace_layer
from paddle_rbt_plugin.handover.pir.verification import verify
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import Analysis, analyse

sys.path.insert(0, str(WORKERS))
CHANNELS = 4
DP2 = ProcessMesh(("dp",), (2,), (0, 1))


def analysed(trace: Trace) -> Analysis:
    return analyse(trace.graph, load_plugins(()).patterns)


def traced() -> Trace:
    from batch_norm import BATCH, Network
    from paddle.static import InputSpec
    from steps import WithLoss

    spec = [InputSpec([BATCH, 3, 8, 8], "float32", "images"), InputSpec([BATCH, 1], "int64", "labels")]
    return trace_layer(WithLoss(Network(), paddle.nn.CrossEntropyLoss()), spec)


def test_a_plan_keeps_the_batch_divided_and_counts_the_sums_of_statistics() -> None:
    trace = traced()
    plan = rbt.tune(trace.program, cluster="1x2:A100-80G", search_space={"dp": 2})
    (comparison,) = verify(plan, trace.graph, trace.program)
    assert comparison.differences == ()
    completion = analysed(trace).complete(DP2)
    kernels = [k for work in completion.work for k in (*work.forward, *work.backward)]
    assert not [c for k in kernels for c in k.collectives if c.kind == "all_gather" and len(c.value.shape) == 4]
    norms = [k for k in kernels if k.type.startswith("batch_norm")]
    assert [[c.value.shape for c in k.collectives] for k in norms] == [[(SUMS * CHANNELS,)]] * 8  # four forward, four backward
    assert not [note for note in plan.notes if "batch_norm" in note]


def test_a_norm_of_a_divided_batch_moves_more_than_that_of_a_whole_one() -> None:
    trace = traced()

    def moved(mesh: ProcessMesh, phase: str) -> float:
        """Bytes of a batch norm, of as many samples."""
        works = analysed(trace).complete(mesh).work
        kernels = [k for work in works for k in (*work.forward, *work.backward)]
        values, table = Values(mesh.axes, "fp32"), KernelTable()
        columns = Columns(values)
        norm = next(k for k in kernels if k.type.startswith("batch_norm") and k.phase == phase)
        table.add(norm, Traffic(norm.inputs, norm.outputs, launched=True), columns)
        sizes = values.table()
        return float(table.frozen(sizes).nbytes(sizes.local(mesh, np.ones(1), sequence_parallel=False))[0, 0])

    whole = ProcessMesh(("mp",), (2,), (0, 1))
    for phase, times in (("forward", FORWARD_TRAFFIC), ("backward", BACKWARD_TRAFFIC)):
        assert moved(DP2, phase) == pytest.approx(times * moved(whole, phase) / 2, rel=0.1)


def test_the_running_statistics_are_changed_in_place() -> None:
    from paddle.distributed.passes.pass_base import PassContext, new_pass

    program = traced().program
    attrs = {"cluster": "1x2:A100-80G", "search_space": {"dp": 2}}
    new_pass("rule_based_tuner", attrs).apply([program], [paddle.static.Program()], PassContext())
    changes = [op for op in program.global_block().ops if op.name() == "pd_op.assign_out_"]
    statistics = [op.operand_source(1).get_defining_op() for op in changes]
    assert len(statistics) == 8  # means and variances of four norms
    assert all(op.name() == "builtin.parameter" for op in statistics)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["to_static", "dygraph"])
def test_losses_and_running_statistics_are_the_serial_ones(tmp_path: Path, entry: str) -> None:
    def run(entry: str, processes: int) -> dict[str, Any]:
        (tmp_path / entry).mkdir()
        return launch("batch_norm.py", processes, tmp_path / entry / "out.json", entry)

    serial, parallel = run("serial", 1), run(entry, 2)
    assert parallel["losses"] == pytest.approx(serial["losses"], abs=1e-5)
    if entry == "to_static":
        assert parallel["evaluation"] == pytest.approx(serial["evaluation"], abs=1e-5)
    assert parallel["statistics"].keys() == serial["statistics"].keys() and len(serial["statistics"]) == 8
    for name, values in serial["statistics"].items():
        assert parallel["statistics"][name] == pytest.approx(values, abs=1e-5), name
