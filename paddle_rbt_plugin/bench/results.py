"""What a run of the suite found, as plain data: saved, read, and compared with that of another day."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.file_schema import no_constant, problem, unprintable

SCHEMA = 1
_FIGURES = ("step_time_s", "peak_memory_bytes", "mfu")
_SAME = 1e-6
"""Relative difference below which two figures are the same."""


@dataclass(frozen=True)
class Row:
    """One strategy of a case: what the cost model says of it, or why there is nothing to say."""

    kind: str
    """``ours``, ``published`` or ``reference`` (Paddle's own tuner)."""
    source: str = ""
    """Where it was published."""
    candidate: Mapping[str, Any] | None = None
    """The decision, in the words of a plan's ``candidates``."""
    step_time_s: float | None = None
    peak_memory_bytes: int | None = None
    """On the fullest device."""
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    """Model FLOP per second over the device's peak in the precision of training; recomputation does not count."""
    tuning_s: float | None = None
    """CPU seconds that finding it took, tracing the model included: on an idle machine the time that passes."""
    measured_step_time_s: float | None = None
    """As published."""
    reason: str = ""
    """Why there are no figures."""


@dataclass(frozen=True)
class Result:
    """A case and its rows: ours first."""

    case: str
    model: str
    cluster: str
    devices: int
    global_batch: int
    precision: str
    rows: tuple[Row, ...]

    @property
    def ours(self) -> Row:
        return self.rows[0]

    def slower(self, row: Row) -> float | None:
        """By what share of our step a step of a row is longer; None for ours and for one without figures."""
        if row is self.ours or row.step_time_s is None or self.ours.step_time_s is None:
            return None
        return row.step_time_s / self.ours.step_time_s - 1


def to_json(results: Sequence[Result], versions: Mapping[str, str]) -> dict[str, Any]:
    """The results as plain JSON values, with the versions of the software that found them."""
    return {"schema": SCHEMA, "versions": dict(versions), "cases": [asdict(result) for result in results]}


def load_results(path: str | Path) -> list[Result]:
    """The results that a file holds. Raises TunerError that names the file and the field that is wrong."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=no_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise TunerError(f"the results {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise TunerError(f"{path} does not hold results of 'paddle-rbt bench' in schema {SCHEMA}; write some with --save")
    wrong = problem("paddle_rbt_plugin.bench", "results.schema.json", data) or _unfit(data)
    if wrong:
        raise TunerError(f"{path} was not written by 'paddle-rbt bench --save': {wrong}")
    return [Result(**{**case, "rows": tuple(Row(**row) for row in case["rows"])}) for case in data["cases"]]


def _unfit(data: Mapping[str, Any]) -> str:
    """What is wrong in results of the right form; empty where nothing is."""
    if where := unprintable(data):
        return f"{where} holds text that cannot be printed"
    names = [case["case"] for case in data["cases"]]
    for i, name in enumerate(names):
        if name in names[:i]:
            return f"cases/{i}/case: {name!r} occurs twice"
        kinds = [row["kind"] for row in data["cases"][i]["rows"]]
        if kinds[0] != "ours" or "ours" in kinds[1:]:
            return f"cases/{i}/rows: the first row, and no other, must be of kind 'ours'"
    return ""


@dataclass(frozen=True)
class Change:
    """One thing that differs between two runs; ``before`` is None for what is new, ``after`` for what is gone."""

    case: str
    row: str
    """Which row: its kind, or the source of a published strategy; empty for a whole case."""
    what: str
    before: Any
    after: Any


def compare(before: Sequence[Result], after: Sequence[Result]) -> list[Change]:
    """What changed from one run to the next: cases, rows, decisions and figures. Tuning times differ from run to run and are
    left out."""
    was, now = ({r.case: r for r in results} for results in (before, after))
    return [change for case in dict.fromkeys([*was, *now]) for change in _case_changes(case, was.get(case), now.get(case))]


def _case_changes(case: str, was: Result | None, now: Result | None) -> Iterator[Change]:
    if was is None or now is None:
        yield Change(case, "", "case", was and was.model, now and now.model)
        return
    for what in ("model", "cluster", "global_batch", "precision"):
        if getattr(was, what) != getattr(now, what):
            yield Change(case, "", what, getattr(was, what), getattr(now, what))
    old, new = ({row.source or row.kind: row for row in result.rows} for result in (was, now))
    for name in dict.fromkeys([*old, *new]):
        yield from _row_changes(case, name, old.get(name), new.get(name))


def _row_changes(case: str, name: str, was: Row | None, now: Row | None) -> Iterator[Change]:
    if was is None or now is None:
        yield Change(case, name, "row", was and was.candidate, now and now.candidate)
        return
    if was.candidate != now.candidate:
        yield Change(case, name, "plan", was.candidate, now.candidate)
    if was.reason != now.reason:
        yield Change(case, name, "reason", was.reason or None, now.reason or None)
    for what in _FIGURES:
        a, b = getattr(was, what), getattr(now, what)
        if a != b and (a is None or b is None or abs(b - a) > _SAME * abs(a)):
            yield Change(case, name, what, a, b)
