"""``paddle-rbt estimate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from paddle_rbt_plugin.cli.output import Output, make_table, titled
from paddle_rbt_plugin.runs import estimate_runs
from paddle_rbt_plugin.spelling import counted, spell_bytes, spell_seconds


def estimate_file(output: Output, path: str) -> None:
    """Prints the predicted step time and peak memory of every run of a table, in its order."""
    with output.progress(f"predicting {path}") as report:
        runs = estimate_runs(path, report)
    output.result({"runs": runs}, _table(path, runs))


def _table(path: str, runs: Sequence[Mapping[str, Any]]) -> RenderableType:
    columns = ("run", "step time", "memory", "fits", "TFLOP/s per device")
    table = make_table(*columns, right=columns[1:])
    for run in runs:
        fits = Text("yes", style="green") if run["fits"] else Text("no", style="red")
        time, memory = spell_seconds(run["step_time_s"]), spell_bytes(run["peak_memory_bytes"])
        table.add_row(run["id"], time, memory, fits, f"{run['tflops_per_gpu']:.3g}")
    return titled(f"{counted(len(runs), 'run')} of {path}", table)
