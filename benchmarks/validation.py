"""How well predictions agree with published training runs.

    python benchmarks/validation.py [FILE.csv ...] [--runs]

Prints one line per file, by default for the tables in ``benchmarks/published`` that hold measured times: mean error of the step
time (MAPE); rank correlation (Spearman) and regret among the runs of one model, number of devices and batch; the errors of
peak memory; and measured runs that are predicted not to fit. With ``--runs`` also one line per run.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.runs import Score, TrainingRun, estimate_runs, read_runs, score_runs

PUBLISHED = Path(__file__).parent / "published"
MEASURED = ("megatron_sc21.csv", "megatron_sequence_parallel.csv", "paddlenlp_llama2_7b.csv")
"""The published tables with measured step times."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="tables of runs (default: the published ones)")
    parser.add_argument("--runs", action="store_true", help="one line per run as well")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    console = Console()
    scores: dict[str, tuple[Score, float]] = {}
    try:
        for path in arguments.files or [PUBLISHED / name for name in MEASURED]:
            started = time.monotonic()
            runs = read_runs(path)
            with Progress(console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task(path.name, total=len(runs))
                results = estimate_runs(path, lambda done, _, task=task, bar=bar: bar.update(task, completed=done))
            scores[path.name] = score_runs(runs, results), time.monotonic() - started
            if arguments.runs:
                console.print(runs_table(path.name, runs, results))
    except TunerError as error:
        Console(stderr=True).print(f"{error}", style="red", markup=False)
        return 1
    console.print(score_table(scores))
    return 0


def score_table(scores: Mapping[str, tuple[Score, float]]) -> Table:
    """One line per file."""
    table = Table("file", title="Predicted against measured")
    for name in ("runs", "MAPE", "Spearman", "regret max", "mean", "memory", "not fitting", "took"):
        table.add_column(name, justify="right")
    for name, (score, took) in scores.items():
        table.add_row(
            name,
            str(score.runs),
            percent(score.mape),
            "" if math.isnan(score.spearman) else f"{score.spearman:.2f}",
            percent(score.regret_max),
            percent(score.regret_mean),
            " ".join(f"{e:+.1%}" for e in score.memory_errors),
            str(score.not_fitting),
            f"{took:.0f} s",
        )
    return table


def runs_table(title: str, runs: Sequence[TrainingRun], results: Sequence[Mapping[str, Any]]) -> Table:
    """One line per run."""
    table = Table("run", title=title)
    for name in ("measured s", "predicted s", "error", "memory GiB", "TFLOP/s"):
        table.add_column(name, justify="right")
    for run, result in zip(runs, results, strict=True):
        measured, predicted = run.measured_step_time_s, result["step_time_s"]
        table.add_row(
            run.id,
            "" if measured is None else f"{measured:.3f}",
            f"{predicted:.3f}",
            "" if measured is None else f"{predicted / measured - 1:+.1%}",
            f"{result['peak_memory_bytes'] / 2**30:.1f}" + ("" if result["fits"] else " !"),
            f"{result['tflops_per_gpu']:.0f}",
        )
    return table


def percent(value: float) -> str:
    """A share as a percentage, empty where there is none."""
    return "" if math.isnan(value) else f"{value:.1%}"


if __name__ == "__main__":
    raise SystemExit(main())
