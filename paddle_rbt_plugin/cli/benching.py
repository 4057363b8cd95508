"""``paddle-rbt bench``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

import paddle
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from paddle_rbt_plugin.bench.case import Case, find_case, suite
from paddle_rbt_plugin.bench.reference import ReferenceTuner
from paddle_rbt_plugin.bench.report import NAMES, cells, draw, named, numbered, plot_format, to_markdown
from paddle_rbt_plugin.bench.results import Change, Result, Row, compare, load_results, to_json
from paddle_rbt_plugin.bench.run import Bench
from paddle_rbt_plugin.cli.output import Output, Report, make_table, titled
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.plan.files import check_writable, save_file
from paddle_rbt_plugin.plugins import parse_cluster
from paddle_rbt_plugin.search import Watcher
from paddle_rbt_plugin.spelling import counted, spell_bytes, spell_candidate, spell_seconds

_STEPS = 100
"""Progress counts a case as so many steps."""


def list_cases(output: Output) -> None:
    """Prints the cases of the suite."""
    columns = ("case", "model", "cluster", "batch", "published strategies")
    table = make_table(*columns, right=columns[3:])
    for case in suite():
        cluster = parse_cluster(case.cluster)
        table.add_row(case.name, case.model, str(cluster), str(case.global_batch), str(len(case.experts)))
    output.result({"cases": [asdict(case) for case in suite()]}, table)


def run_suite(
    output: Output,
    cases: Sequence[str],
    reference: bool,
    reference_limit: float,
    save: str | None,
    markdown: str | None,
    plot: str | None,
) -> None:
    """Runs the named cases, all by default, and prints and writes what they found."""
    image = plot_format(plot) if plot is not None else ""  # before minutes of work
    for path in (save, markdown, plot):
        if path is not None:
            check_writable(path)
    chosen = [find_case(name) for name in cases] or list(suite())
    names = [case.name for case in chosen]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise TunerError(f"two cases are named {twice!r}; the names of cases must be unique")
    with output.progress("benchmarks") as report:
        results = _run(chosen, reference, reference_limit, report)
    data = to_json(results, {"paddle-rbt-plugin": version("paddle-rbt-plugin"), "paddle": paddle.__version__})
    # Before anything is printed: whoever reads may leave early.
    if save is not None:
        _write(output, save, json.dumps(data, indent=1) + "\n")
    if markdown is not None:
        _write(output, markdown, to_markdown(results))
    if plot is not None:
        _write(output, plot, draw(results, image))
    output.result(data, *(_table(result) for result in results))


def compare_files(output: Output, before: str, after: str) -> None:
    """Prints what changed between two saved results."""
    changes = compare(load_results(before), load_results(after))
    output.result({"changes": [asdict(change) for change in changes]}, _changes(changes) if changes else "nothing changed")


def _run(cases: Sequence[Case], reference: bool, limit: float, report: Report) -> list[Result]:
    """Runs the cases one after the other; Paddle's own tuner works beside them, and is waited for at the end."""
    benches, results = [], []
    with ReferenceTuner(cases if reference else (), limit) as tuner:
        for i, case in enumerate(cases):
            report(_STEPS * i, _STEPS * len(cases))
            benches.append(Bench(case, _part(report, i, len(cases))))
            results.append(benches[-1].run())
        if not reference:
            return results
        report(_STEPS * len(cases), _STEPS * len(cases), "waiting for Paddle's own tuner")
        return [_with_reference(result, bench, tuner) for result, bench in zip(results, benches, strict=True)]


def _part(report: Report, i: int, count: int) -> Watcher:
    """The progress of one case as that of all."""
    return lambda p: report(_STEPS * i + _STEPS * p.done // max(1, p.total), _STEPS * count)


def _with_reference(result: Result, bench: Bench, tuner: ReferenceTuner) -> Result:
    answer = tuner.answer(bench.case)
    if answer.strategy is None:
        row = Row("reference", reason=answer.reason)
    else:
        row = bench.judge("reference", answer.strategy, tuning_s=answer.tuning_s)
    return replace(result, rows=(*result.rows, row))


def _write(output: Output, path: str, content: str | bytes) -> None:
    save_file(path, content)
    output.note(f"written to {path}")


def _table(result: Result) -> RenderableType:
    columns = ("strategy", "step", "slower", "memory", "MFU", "tuning")
    table, notes = make_table(*columns, right=columns[1:]), list[str]()
    for row in result.rows:
        plan, *figures = cells(result, row)
        table.add_row(f"{named(row, notes)}: {plan}", *figures)
    title = f"{result.case}: {result.model} on {result.cluster}, batch {result.global_batch}, {result.precision}"
    return Group(titled(title, table), *(Padding(Text(note), 0) for note in numbered(notes)), "")


def _changes(changes: Sequence[Change]) -> RenderableType:
    table = make_table("case", "strategy", "what", "before", "after", right=("before", "after"))
    for change in changes:
        before, after = (_spell(change.what, value) for value in (change.before, change.after))
        table.add_row(change.case, NAMES.get(change.row, change.row), change.what.replace("_", " "), before, after)
    return titled(counted(len(changes), "change"), table)


def _spell(what: str, value: Any) -> str:
    if value is None:
        return "none"
    if what in ("plan", "row"):
        return spell_candidate(value)
    spell: dict[str, Callable[[Any], str]] = {
        "step_time_s": spell_seconds,
        "peak_memory_bytes": spell_bytes,
        "mfu": lambda share: f"{share:.1%}",
    }
    return spell.get(what, str)(value)
