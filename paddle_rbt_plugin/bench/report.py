"""The results as Markdown and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import PurePath
from typing import Any

from paddle_rbt_plugin.bench.results import Result, Row
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.spelling import spell_bytes, spell_candidate, spell_seconds

NAMES = {"ours": "paddle-rbt", "published": "published", "reference": "Paddle's own tuner"}
"""Who chose a strategy, by kind of row."""
FORMATS = ("svg", "png", "pdf")
_COLORS = {"ours": "#4051b5", "published": "#f0a030", "reference": "#9a9a9a"}


def cells(result: Result, row: Row) -> tuple[str, ...]:
    """Plan, step time, how much slower than ours, memory, MFU, tuning time; empty where a row has no figures."""
    slower = result.slower(row)
    return (
        spell_candidate(row.candidate) if row.candidate else "none",
        "" if row.step_time_s is None else spell_seconds(row.step_time_s),
        "" if slower is None else f"{slower:+.1%}",
        "" if row.peak_memory_bytes is None else spell_bytes(row.peak_memory_bytes),
        "" if row.mfu is None else f"{row.mfu:.1%}",
        "" if row.tuning_s is None else spell_seconds(row.tuning_s),
    )


def to_markdown(results: Sequence[Result]) -> str:
    """One table of all cases, with sources and reasons as numbered notes below it."""
    notes: list[str] = []
    header = ("case", "strategy of", "plan", "step", "slower", "memory", "MFU", "tuning")
    lines = [_line(header), _line(["---"] * 3 + ["---:"] * 5)]
    for result in results:
        where = f"**{result.case}**<br>{result.cluster}, batch {result.global_batch}, {result.precision}"
        for row in result.rows:
            lines.append(_line((where if row is result.ours else "", named(row, notes), *cells(result, row))))
    return "\n".join([*lines, "", *numbered(notes)]) + "\n"


def named(row: Row, notes: list[str]) -> str:
    """Who chose a strategy, with the number of the note that says more; a new note is added to ``notes``."""
    measured = f"measured there: {spell_seconds(row.measured_step_time_s)} per step" if row.measured_step_time_s else ""
    note = "; ".join(text for text in (row.source, measured, row.reason) if text)
    if not note:
        return NAMES[row.kind]
    if note not in notes:
        notes.append(note)
    return f"{NAMES[row.kind]} ({notes.index(note) + 1})"


def numbered(notes: Sequence[str]) -> list[str]:
    """The notes with their numbers."""
    return [f"{i}. {note}" for i, note in enumerate(notes, 1)]


def _line(values: Sequence[str]) -> str:
    return "| " + " | ".join(value.replace("|", "\\|") for value in values) + " |"


def plot_format(path: str) -> str:
    """The format of a plot by the ending of its file's name. Raises TunerError for an unknown one, or without matplotlib."""
    found = PurePath(path).suffix.removeprefix(".").lower()
    if found not in FORMATS:
        raise TunerError(
            f"no plot can be written to {path!r}: its name must end in .{', .'.join(FORMATS[:-1])} or .{FORMATS[-1]}"
        )
    if find_spec("matplotlib") is None:
        raise TunerError("a plot needs matplotlib: install 'paddle-rbt-plugin[plot]'")
    return found


def draw(results: Sequence[Result], file_format: str) -> bytes:
    """The MFU of every case as an image in one of ``FORMATS``: one group of bars per case, the best published strategy beside
    ours."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    kinds = [kind for kind in NAMES if any(_best_mfu(r, kind) for r in results)]
    height, size = 0.8 / len(kinds), {"fontsize": 7}
    with rc_context({"svg.hashsalt": "paddle-rbt", "svg.fonttype": "none"}):  # the same results, the same file
        figure = Figure(figsize=(8, 1 + 0.45 * len(results)), layout="constrained")
        axes: Any = figure.subplots()
        for i, kind in enumerate(kinds):
            shares = [100 * _best_mfu(r, kind) for r in results]
            places = [j + i * height for j in range(len(results))]
            bars = axes.barh(places, shares, height, label=NAMES[kind], color=_COLORS[kind])
            axes.bar_label(bars, [f"{share:.0f}" if share else "" for share in shares], padding=2, **size)
        middles = [j + 0.4 - height / 2 for j in range(len(results))]
        axes.set_yticks(middles, [f"{r.case}\n{r.cluster}" for r in results], **size)
        axes.invert_yaxis()
        axes.set_xlabel("predicted MFU, %")
        axes.legend(loc="lower right", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        image = BytesIO()
        figure.savefig(image, format=file_format, metadata={"Date": None} if file_format == "svg" else None)
    return image.getvalue()


def _best_mfu(result: Result, kind: str) -> float:
    return max((row.mfu or 0.0 for row in result.rows if row.kind == kind), default=0.0)
