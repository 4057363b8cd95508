"""Does the order that is predicted hold? Plans trained for real by CPU processes, beside what the planner says of them.

    python benchmarks/ranking.py [--models NAME,...] [--processes N,...] [--way static|dygraph] [--cluster FILE,...]

Three models of different shape; for each number of processes the devices are calibrated (or described by ``--cluster``, one
file per number), every dp and mp plan is made on that profile as ``paddle-rbt plan`` makes it, and trained, the first steps
left out. Prints predicted and measured seconds, and for each pair of plans whose measured times differ by more than 15 %
whether the order agrees; the exit code is 1 if one does not. Keep the machine free of other work meanwhile.

Static programs of Paddle compute wrong numbers on the CPU when two axes are active; those plans run with ``--way dygraph``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import ranking_training
from outputs import output_file
from rich.console import Console
from rich.table import Table

from paddle_rbt_plugin.calibrate import calibrate
from paddle_rbt_plugin.cluster import parse_cluster
from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.handover.pir.configs import config_graph
from paddle_rbt_plugin.models import Config, GPTConfig, LlamaConfig
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.processes import Processes
from paddle_rbt_plugin.request import Request
from paddle_rbt_plugin.tuner import tune_graph

MODELS: dict[str, tuple[Config, int]] = {
    "wide": (GPTConfig(layers=2, hidden=1024, ffn=4096, heads=16, vocab=2048, seq=32), 4),
    "deep": (GPTConfig(layers=12, hidden=64, ffn=256, heads=4, vocab=8192, seq=128), 16),
    "gated": (LlamaConfig(layers=4, hidden=192, ffn=512, heads=12, kv_heads=12, vocab=2048, seq=256), 8),
}
"""Each with its batch: many parameters and few tokens; narrow, deep, many tokens and a large vocabulary; gated with rotary
positions and long sequences."""
WARM_UP, STEPS = 3, 8
TIMEOUT_S = 180
CLOSE = 0.15
"""Measured times that differ by less are taken for equal."""
SAME_LOSS = 1e-3
"""Relative difference of losses that the order of sums explains after a few steps."""
FIXED = {"pp": 1, "accumulate_steps": 1, "recompute": "none", "sharding_stage": 0, "sequence_parallel": False}


@dataclass(frozen=True)
class Row:
    """One plan of one model, trained by ``processes``."""

    model: str
    processes: int
    plan: str
    predicted_s: float
    measured_s: float
    loss: float
    predicted: dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--processes", default="2,4")
    parser.add_argument("--way", choices=("static", "dygraph"), default="static")
    parser.add_argument("--cluster", help="profiles instead of a calibration, in the order of --processes")
    parser.add_argument("--json", type=output_file, help="write the figures to this file")
    arguments = parser.parse_args()
    console = Console()
    counts = [int(n) for n in arguments.processes.split(",")]
    profiles = arguments.cluster.split(",") if arguments.cluster else [""] * len(counts)
    rows: list[Row] = []
    for count, profile in zip(counts, profiles, strict=True):
        text = Path(profile).read_text() if profile else calibrate(count).text
        print(text, flush=True)
        for name in arguments.models.split(","):
            for row in compare(name, count, text, arguments.way):
                print(
                    f"{row.model}, {count} processes, {row.plan}: {row.predicted_s:.3f} s, measured {row.measured_s:.3f} s",
                    flush=True,
                )
                rows.append(row)
    console.print(rows_table(rows, arguments.way))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    wrong = [pair for pair in apart(rows) if not agree(*pair)]
    for a, b in apart(rows):
        verdict = "agree" if agree(a, b) else "DISAGREE"
        console.print(
            f"{a.model}, {a.processes} processes, {a.plan} / {b.plan}: measured {a.measured_s / b.measured_s:.2f}, "
            f"predicted {a.predicted_s / b.predicted_s:.2f}: {verdict}"
        )
    return 1 if wrong else 0


def compare(name: str, processes: int, profile: str, way: str) -> Iterator[Row]:
    """Predicts and trains every plan of a model. Raises SystemExit where plans learn different things."""
    config, batch = MODELS[name]
    graph = config_graph(config, batch)
    losses: dict[str, float] = {}
    for degrees in degrees_of(processes, way):
        spelt = " x ".join(f"{axis}{n}" for axis, n in degrees.items() if n > 1)
        with Processes(f"{name} under {spelt}", processes, WARM_UP + STEPS, "steps", TIMEOUT_S) as running:
            plan = planned(graph, batch, running.directory, profile, degrees)
            model = {"arch": config.arch, "config": asdict(config), "batch": batch}
            (running.directory / "model.json").write_text(json.dumps(model))
            running.start(ranking_training.__file__, way, str(WARM_UP + STEPS))
            steps = wait(running)
        losses[spelt] = steps[-1]["loss"]
        if max(losses.values()) > min(losses.values()) * (1 + SAME_LOSS):
            raise SystemExit(f"{name} learns different things under different plans: {losses}")
        measured = median(step["seconds"] for step in steps[WARM_UP:])
        estimate = plan.estimate
        yield Row(name, processes, spelt, estimate.step_time_s, measured, steps[-1]["loss"], dict(estimate.time))


def degrees_of(processes: int, way: str) -> Iterator[dict[str, int]]:
    """Every dp x mp of that many processes that can be trained."""
    for mp in range(1, processes + 1):
        dp = processes // mp
        if processes % mp == 0 and (way == "dygraph" or 1 in (dp, mp)):
            yield {"dp": dp, "mp": mp}


def planned(graph: Graph, batch: int, directory: Path, profile: str, degrees: dict[str, int]) -> Plan:
    """The plan of the given degrees on the profile; both lie in the directory afterwards."""
    path = directory / "cluster.yaml"
    path.write_text(profile)
    plan = tune_graph(graph, Request(Settings(cluster=parse_cluster(path), search_space=FIXED | degrees), global_batch=batch))
    plan.save(directory / "plan.json")
    return plan


def wait(running: Processes) -> Sequence[Any]:
    """What the processes have told when all have ended."""
    while not running.ended:
        running.check()
        time.sleep(0.1)
    return running.lines


def apart(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Pairs of plans of one model and number of processes whose measured times differ, the slower first."""
    pairs = [sorted(pair, key=lambda r: -r.measured_s) for pair in combinations(rows, 2)]
    return [
        (slow, fast)
        for slow, fast in pairs
        if (slow.model, slow.processes) == (fast.model, fast.processes) and slow.measured_s > fast.measured_s * (1 + CLOSE)
    ]


def agree(slow: Row, fast: Row) -> bool:
    return slow.predicted_s > fast.predicted_s


def rows_table(rows: Sequence[Row], way: str) -> Table:
    table = Table("model", "processes", "plan", title=f"Seconds of a step ({way})")
    for name in ("predicted", "measured", "error", "loss"):
        table.add_column(name, justify="right")
    for r in rows:
        error = f"{r.predicted_s / r.measured_s - 1:+.0%}"
        table.add_row(r.model, str(r.processes), r.plan, f"{r.predicted_s:.3f}", f"{r.measured_s:.3f}", error, f"{r.loss:.4f}")
    return table


if __name__ == "__main__":
    raise SystemExit(main())
