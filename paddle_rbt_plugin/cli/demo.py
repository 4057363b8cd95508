"""``paddle-rbt demo``: a small GPT trained by several CPU processes under a found plan, beside a serial run of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import paddle
from paddle.utils import unique_name
from rich.console import RenderableType

from paddle_rbt_plugin.cli import demo_training
from paddle_rbt_plugin.cli.output import Output, Report, make_table, titled
from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.pir.trace import trace_layer
from paddle_rbt_plugin.plan.explain import decision
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.processes import Processes
from paddle_rbt_plugin.request import Constraint, Request
from paddle_rbt_plugin.spelling import spell_candidate
from paddle_rbt_plugin.tuner import tune_graph

TOLERANCE = 1e-5
"""Float32 keeps seven digits of a loss of about 5; sums in another order cost the last of them."""

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
        comparison = compare(plan, way, steps, timeout, report)
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
        "the demo",
        {
            "pp": (1,),
            "accumulate_steps": (1,),
            "recompute": ("none",),
            "sharding_stage": (0,),
            "sequence_parallel": (False,),
        },
    )
    settings = Settings(cluster=f"1x{processes}:CPU", search_space=fixed)
    return tune_graph(graph, Request(settings, global_batch=demo_training.BATCH, constraints=(runnable,)))


def choose_way(plan: Plan) -> tuple[Way, str]:
    """How the plan is trained, and why so."""
    if paddle.is_compiled_with_cuda():
        return "dygraph", "in dygraph: static programs of a Paddle built for GPUs do not communicate between CPU processes"
    if sum(n > 1 for n in plan.degrees.values()) > 1:
        return "dygraph", "in dygraph: static programs of Paddle compute wrong numbers on CPU when two axes are active"
    return "static", "as a static program, through dist.to_static and the tuner's pass: only one axis is active"


def compare(plan: Plan, way: Way, steps: int, timeout: int, report: Report) -> Comparison:
    """Trains in this process while the others start. Raises TunerError where one of them fails or all take too long."""
    serial = []
    with Processes("the demo", len(plan.stages[0].devices), steps, "steps", timeout) as processes:
        plan.save(processes.directory / "plan.json")
        processes.start(demo_training.__file__, way, str(steps))
        for loss in demo_training.train_serial(steps):
            serial.append(loss)
            processes.check()
        while not processes.ended:
            processes.check()
            report(len(processes.lines), steps)
            time.sleep(0.1)
        return Comparison(tuple(serial), processes.lines)


def _table(title: str, comparison: Comparison) -> RenderableType:
    columns = ("step", "serial loss", "distributed loss", "difference")
    table = make_table(*columns, right=columns)
    rows = zip(comparison.serial, comparison.distributed, comparison.differences, strict=True)
    for step, (serial, distributed, difference) in enumerate(rows):
        # As float32, which they are, the shortest digits that tell them from every other.
        table.add_row(str(step), str(np.float32(serial)), str(np.float32(distributed)), f"{difference:.1e}")
    return titled(title, table)
