"""``paddle-rbt demo``: a small GPT trained by several CPU processes under a found plan, beside a serial run of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import paddle
from paddle.utils import unique_name
from rich.table import Table

from paddle_rbt_plugin.cli import demo_training
from paddle_rbt_plugin.cli.output import Output, Report, make_table
from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.trace import trace_layer
from paddle_rbt_plugin.plan.explain import decision, spell_candidate
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.tuner import Constraint, tune_graph

TOLERANCE = 1e-5
"""Float32 keeps seven digits of a loss of about 5; sums in another order cost the last of them."""
_LOG_LINES = 15
_STOP_SECONDS = 40
"""The launcher gives its workers 30 s to end before it kills them."""

Way = Literal["static", "dygraph"]


@dataclass(frozen=True)
class Comparison:
    """Loss of every step, serial and distributed."""

    serial: tuple[float, ...]
    distributed: tuple[float, ...]

    @property
    def differences(self) -> tuple[float, ...]:
        return tuple(abs(a - b) for a, b in zip(self.serial, self.distributed, strict=True))

    @property
    def holds(self) -> bool:
        """Every difference is within the tolerance; one that is not a number is not."""
        return all(difference <= TOLERANCE for difference in self.differences)


def run_demo(output: Output, processes: int, fixed: Sequence[tuple[str, Any]], steps: int, timeout: int) -> None:
    """Plans, trains both ways, and prints the losses side by side. Raises TunerError where they differ."""
    plan = find_plan(processes, dict(fixed))
    way, why = choose_way(plan)
    with output.progress(f"training with {processes} processes") as report:
        comparison = compare(plan, way, processes, steps, timeout, report)
    summary = {
        "processes": processes,
        "candidate": decision(plan),
        "way": way,
        "why": why,
        "steps": [
            {"step": i, "serial": a, "distributed": b, "difference": d}
            for i, (a, b, d) in enumerate(zip(comparison.serial, comparison.distributed, comparison.differences, strict=True))
        ],
        "largest_difference": max(comparison.differences),
        "tolerance": TOLERANCE,
        "holds": comparison.holds,
    }
    title = f"{processes} processes, {spell_candidate(decision(plan))}"
    end = f"largest difference {max(comparison.differences):.1e}, allowed {TOLERANCE:.0e}"
    output.result(summary, _table(title, comparison), end, f"trained {why}")
    if not comparison.holds:
        worst = int(np.argmax(comparison.differences))
        raise TunerError(
            f"serial and distributed loss differ by {comparison.differences[worst]:.1e} at step {worst}, "
            f"more than the {TOLERANCE:.0e} that float32 explains"
        )


def find_plan(processes: int, fixed: dict[str, Any]) -> Plan:
    """The tuner's plan of the demo's GPT for that many CPU processes, within what the demo can run."""
    with unique_name.guard(), paddle.LazyGuard():
        model = demo_training.GPT()
    inputs, labels = demo_training.specs()
    graph = trace_layer(model, inputs, demo_training.GPTCriterion(), labels).graph
    runnable = Constraint(
        "the demo, which trains without pipeline, accumulation, recomputation and sharding of the optimizer,",
        {
            "pp": (1,),
            "accumulate_steps": (1,),
            "recompute": ("none",),
            "sharding_stage": (0,),
            "sequence_parallel": (False,),
        },
    )
    settings = Settings(cluster=f"1x{processes}:CPU", search_space=fixed)
    return tune_graph(graph, settings, global_batch=demo_training.BATCH, constraints=[runnable])


def choose_way(plan: Plan) -> tuple[Way, str]:
    """How the plan is trained, and why so."""
    if paddle.base.core.is_compiled_with_cuda():
        return "dygraph", "in dygraph: static programs of a Paddle built for GPUs do not communicate between CPU processes"
    if sum(n > 1 for n in plan.degrees.values()) > 1:
        return "dygraph", "in dygraph: static programs of Paddle compute wrong numbers on CPU when two axes are active"
    return "static", "as a static program, through dist.to_static and the tuner's pass: only one axis is active"


def compare(plan: Plan, way: Way, processes: int, steps: int, timeout: int, report: Report) -> Comparison:
    """Trains in this process while the others start. Raises TunerError where one of them fails or all take too long."""
    with (
        tempfile.TemporaryDirectory(prefix="paddle-rbt-demo-") as directory,
        _launched(plan, way, processes, steps, Path(directory)) as launcher,
    ):
        serial = tuple(demo_training.train_serial(steps))
        deadline = time.monotonic() + timeout
        while launcher.poll() is None:
            if time.monotonic() > deadline:
                raise TunerError(
                    f"the {processes} processes did not end within {timeout} s and were stopped; "
                    f"they reached step {len(_losses(directory))} of {steps}.{_log_tail(directory)}"
                )
            report(len(_losses(directory)), steps)
            time.sleep(0.1)
        distributed = _losses(directory)
        if launcher.returncode or len(distributed) < steps:
            raise TunerError(
                f"a process of the demo failed (exit code {launcher.returncode}) after step {len(distributed)} of {steps}."
                f"{_log_tail(directory)}"
            )
    return Comparison(serial, distributed)


@contextmanager
def _launched(plan: Plan, way: Way, processes: int, steps: int, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher of the processes; none of them outlives the block."""
    plan.save(directory / "plan.json")
    command = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(processes), "--backend", "gloo"]
    command += ["--log_dir", str(directory / "log"), demo_training.__file__]
    command += [way, str(directory / "plan.json"), str(steps), str(directory / "losses")]
    # A session of its own: Ctrl-C reaches this process only, which then ends the launcher in order.
    with (
        (directory / "launch.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=_environment(processes), start_new_session=True) as launcher,
    ):
        try:
            yield launcher
        finally:
            if launcher.poll() is None:
                launcher.terminate()
                try:
                    launcher.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    launcher.kill()


def _environment(processes: int) -> dict[str, str]:
    """This process's environment, less what another launcher may have left in it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PADDLE_")}
    root = str(Path(__file__).parents[2])
    return kept | {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)),
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "PYTHONSAFEPATH": "1",  # the modules beside the script are not top-level modules
    }


def _losses(directory: str) -> tuple[float, ...]:
    """What the first process has written; a line that is still being written does not count."""
    path = Path(directory) / "losses"
    text = path.read_text() if path.exists() else ""
    return tuple(json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n"))


def _log_tail(directory: str) -> str:
    """The end of the log that says most: one with a traceback, else the first worker's, else the launcher's."""
    logs = [*sorted(Path(directory).glob("log/workerlog.*")), Path(directory) / "launch.log"]
    texts = {log.name: log.read_text(errors="replace").strip() for log in logs if log.exists()}
    name = next((n for n, text in texts.items() if "Traceback" in text), next((n for n, t in texts.items() if t), ""))
    lines = texts.get(name, "").splitlines()[-_LOG_LINES:]
    return f" The end of {name}:\n" + "\n".join(f"  {line}" for line in lines) if lines else " It left no log."


def _table(title: str, comparison: Comparison) -> Table:
    columns = ("step", "serial loss", "distributed loss", "difference")
    table = make_table(title, *columns, right=columns)
    rows = zip(comparison.serial, comparison.distributed, comparison.differences, strict=True)
    for step, (serial, distributed, difference) in enumerate(rows):
        # As float32, which they are, the shortest digits that tell them from every other.
        table.add_row(str(step), str(np.float32(serial)), str(np.float32(distributed)), f"{difference:.1e}")
    return table
