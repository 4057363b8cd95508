"""Paddle's own rule-based tuner against this one, on single-machine GPTs as legacy programs.

    FLAGS_enable_pir_api=0 python benchmarks/reference.py [--layers 2 4 8 24] [--json FILE]

The reference plans pp, dp and mp of one micro batch and knows neither recomputation nor ZeRO, so its plan is judged without
them. Four plans of ours stand beside it: by our cost model and by Paddle's CostEstimator (``cost_model="paddle"``), in the
space that the reference knows and with ZeRO besides. All five are costed by both models, on the same program with the same
batch, completed in the same way, on one description of the cluster. "Worse" says how much longer a step is than under the
reference's plan. Times are those of this run. Exits with 1 if no plan of ours is at least as good by both models.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("FLAGS_enable_pir_api", "0")

import paddle
from outputs import output_file
from paddle.utils import unique_name
from rich.console import Console
from rich.table import Table

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.cluster import parse_cluster
from paddle_rbt_plugin.graph.legacy import read_legacy_program
from paddle_rbt_plugin.handover.legacy.judge import judge
from paddle_rbt_plugin.handover.legacy.reference import reference_degrees
from paddle_rbt_plugin.models import GPTConfig, build, input_spec

CLUSTER = "1x8:V100-32G"
BATCH = 8
ONE_PASS = {"accumulate_steps": 1, "recompute": "none"}
AS_THE_REFERENCE = ONE_PASS | {"sharding_stage": 0}
OURS = {
    "ours": (AS_THE_REFERENCE, "analytic"),
    "ours, cost_model='paddle'": (AS_THE_REFERENCE, "paddle"),
    "ours with ZeRO": (ONE_PASS, "analytic"),
    "ours with ZeRO, cost_model='paddle'": (ONE_PASS, "paddle"),
}
ROUNDING = 1e-9
"""Relative difference that is none."""


@dataclass(frozen=True)
class Program:
    """A serial forward program."""

    main: Any
    startup: Any
    loss: Any


@dataclass(frozen=True)
class Row:
    """One plan of one model: seconds per step and bytes per device by both models, and the seconds it took to find."""

    layers: int
    tuner: str
    plan: str
    tuning_s: float
    paddle_step_s: float
    paddle_bytes: float
    analytic_step_s: float
    analytic_bytes: float

    def worse_than(self, other: Row) -> tuple[float, float]:
        """How much longer a step is by Paddle's model and by ours, as a share of the other's."""
        return self.paddle_step_s / other.paddle_step_s - 1, self.analytic_step_s / other.analytic_step_s - 1

    def is_as_good_as(self, other: Row) -> bool:
        return all(share <= ROUNDING for share in self.worse_than(other))


def gpt(layers: int) -> Program:
    config = GPTConfig(layers=layers, hidden=1024, ffn=4096, heads=16, vocab=50304, seq=1024)
    main, startup = paddle.static.Program(), paddle.static.Program()
    with rbt.legacy_static_ops(), paddle.static.program_guard(main, startup), unique_name.guard():
        model = build(config)
        loss = model(*[paddle.static.data(s.name, list(s.shape), s.dtype) for s in input_spec(config, BATCH)])
    return Program(main, startup, loss)


def reference(program: Program) -> dict[str, Any]:
    return reference_degrees(program.main, program.startup, program.loss, "tokens", parse_cluster(CLUSTER))


def ours(program: Program, space: dict[str, Any], cost_model: str = "analytic") -> rbt.Plan:
    return rbt.tune(program.main, loss=program.loss, cluster=CLUSTER, cost_model=cost_model, search_space=space)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def row(layers: int, tuner: str, plan: rbt.Plan, seconds: float) -> Row:
    program = gpt(layers)
    legacy = read_legacy_program(program.main, program.loss)
    optimizer = paddle.optimizer.AdamW(1e-5, grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0))
    theirs = judge(program.main, program.startup, program.loss, optimizer, legacy, plan)
    spelled = " x ".join(f"{axis} {n}" for axis, n in plan.degrees.items() if n > 1)
    spelled += f", ZeRO {plan.sharding_stage}" if plan.sharding_stage else ""
    estimate = plan.estimate
    return Row(
        layers, tuner, spelled, seconds, theirs.step_time_s, theirs.peak_memory_bytes, estimate.step_time_s,
        estimate.peak_memory_bytes,
    )  # fmt: skip


def compare(layers: int) -> list[Row]:
    """The reference's plan, then ours."""
    degrees, seconds = timed(lambda: reference(gpt(layers)))
    rows = [row(layers, "reference", ours(gpt(layers), AS_THE_REFERENCE | degrees), seconds)]
    for name, (space, model) in OURS.items():
        plan, seconds = timed(lambda space=space, model=model: ours(gpt(layers), space, model))
        rows.append(row(layers, name, plan, seconds))
    return rows


def show(compared: list[list[Row]]) -> None:
    table = Table(title=f"GPT, hidden 1024, sequence 1024, batch {BATCH}, on {CLUSTER}; Paddle {paddle.__version__}")
    for name in ("layers", "tuner", "plan", "tuning s", "Paddle's ms", "GiB", "worse", "our ms", "GiB", "worse"):
        table.add_column(name, justify="left" if name in ("tuner", "plan") else "right", no_wrap=True)
    for reference_row, *others in compared:
        for r in (reference_row, *others):
            by_paddle, by_us = (f"{100 * share:+.1f} %" for share in r.worse_than(reference_row))
            theirs = f"{r.paddle_step_s * 1e3:.2f}", f"{r.paddle_bytes / 2**30:.2f}", by_paddle
            mine = f"{r.analytic_step_s * 1e3:.2f}", f"{r.analytic_bytes / 2**30:.2f}", by_us
            table.add_row(str(r.layers), r.tuner, r.plan, f"{r.tuning_s:.1f}", *theirs, *mine)
        table.add_section()
    Console(width=140).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8, 24])
    parser.add_argument("--json", type=output_file, help="also write the rows to this file")
    arguments = parser.parse_args()
    paddle.enable_static()
    compared = [compare(layers) for layers in arguments.layers]
    show(compared)
    as_good = {name: all(rows[i].is_as_good_as(rows[0]) for rows in compared) for i, name in enumerate(OURS, start=1)}
    print("At least as good as the reference's by both models, at every depth: " + (_listed(as_good) or "none"))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"paddle": paddle.__version__, "rows": [vars(r) for rows in compared for r in rows]}, file, indent=1)
    return 0 if any(as_good.values()) else 1


def _listed(as_good: dict[str, bool]) -> str:
    return "; ".join(name for name, good in as_good.items() if good)


if __name__ == "__main__":
    sys.exit(main())
