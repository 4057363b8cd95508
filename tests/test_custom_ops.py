"""Custom ops, built with the compiler: planned and trained where a plugin says what they compute, refused in planning else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
import pytest
from launching import WORKERS, launch
from paddle.utils import cpp_extension

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.handover.dygraph import ops
from paddle_rbt_plugin.handover.pir.trace import Trace, trace_layer
from paddle_rbt_plugin.handover.pir.verification import verify
from paddle_rbt_plugin.plugins import load_plugins

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="a custom op needs a compiler")]

PLUGIN = """
from paddle_rbt_plugin import hookimpl
@hookimpl
def register_op_names(register):
    register("acme_silu", "silu")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    cpp_extension.load("acme_ops", [str(WORKERS / "acme_silu.cc")], build_directory=str(folder))
    (built,) = folder.rglob("*.so")
    return built


@pytest.fixture
def named(install: Any) -> None:
    install("acme", {"names": "acme_names"}, acme_names=PLUGIN)


def traced(monkeypatch: pytest.MonkeyPatch) -> Trace:
    monkeypatch.syspath_prepend(str(WORKERS))
    from custom_op import Gated, distance, specs
    from steps import WithLoss

    return trace_layer(WithLoss(Gated(), distance), specs())


def test_an_op_that_nothing_is_known_of_is_refused_in_planning(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = traced(monkeypatch).program
    with pytest.raises(UnsupportedProgram, match=r"'acme_silu'.*register_op_names"):
        rbt.tune(program, cluster="1x2:A100-80G")


@pytest.mark.parametrize("axis", ["dp", "mp"])
def test_what_is_handed_over_is_what_was_costed(library: Path, named: None, monkeypatch: pytest.MonkeyPatch, axis: str) -> None:
    trace = traced(monkeypatch)
    plan = rbt.tune(trace.program, cluster="1x2:A100-80G", search_space={axis: 2})
    assert plan.patterns["gated_ffn"]["matches"] == 1
    (comparison,) = verify(plan, trace.graph, trace.program)
    assert comparison.differences == ()


def test_a_blocked_plugin_names_no_op_at_hand_over(library: Path, named: None, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced(monkeypatch)
    plan = rbt.tune(trace.program, cluster="1x2:A100-80G", search_space={"dp": 2})
    with pytest.raises(UnsupportedProgram, match="acme_silu"):
        verify(plan, trace.graph, trace.program, blocked=["acme"])


def test_an_eager_custom_op_reads_the_plugins_once(library: Path, named: None, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(ops, "load_plugins", lambda: read.append(1) or load_plugins())
    mesh = dist.ProcessMesh([0], dim_names=["mp"])
    ops.shard_ops(mesh)
    x = dist.shard_tensor(paddle.ones([2, 4]), mesh, [dist.Shard(0)])
    for _ in range(3):
        (y,) = paddle._C_ops._run_custom_op("acme_silu", x, 1.0)
    assert y.is_dist() and len(read) == 1


def test_training_gives_the_serial_losses(library: Path, named: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def losses(processes: int, entry: str, axis: str) -> list[float]:
        folder = tmp_path / f"{entry}-{axis}"
        folder.mkdir()
        return launch("custom_op.py", processes, folder / "out.json", entry, axis, str(library))

    serial = losses(1, "serial", "dp")
    assert serial[0] != pytest.approx(serial[-1], abs=1e-3)
    for entry in ("to_static", "dygraph"):
        for axis in ("dp", "mp"):
            assert losses(2, entry, axis) == pytest.approx(serial, abs=1e-5), (entry, axis)
