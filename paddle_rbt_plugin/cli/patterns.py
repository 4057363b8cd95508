"""``paddle-rbt patterns``, and ``paddle-rbt patterns --why-not NAME --model MODEL``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace

from rich.console import RenderableType
from rich.text import Text

from paddle_rbt_plugin.cli.output import Output, make_table, titled
from paddle_rbt_plugin.model_reference import model_graph
from paddle_rbt_plugin.pattern.report import match_report
from paddle_rbt_plugin.pattern.vocabulary import spell_unknown, unknown_ops
from paddle_rbt_plugin.plugins import PluginRow, Plugins, PluginWarning, load_plugins
from paddle_rbt_plugin.testing.matching import BATCH

_STYLES = {"active": "green", "broken": "red", "blocked": "yellow"}


def list_patterns(output: Output, blocked: Sequence[str]) -> None:
    """Prints everything that plugins register with where it comes from and its state; broken plugins are rows like others."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "plugin .* is left out", PluginWarning)  # the table says so
        plugins = load_plugins(blocked)
    rows = [_with_remark(row, plugins) for row in plugins.rows]
    groups: dict[tuple[str, str], list[PluginRow]] = {}
    for row in rows:
        groups.setdefault((_source(row), row.kind.replace("_", " ")), []).append(row)
    tables = [_table(source, kind, group) for (source, kind), group in groups.items()]
    remarks = [_remark(row) for row in rows if row.reason]
    output.result(_by_kind(rows), *tables, *remarks)


def explain_pattern(output: Output, name: str, model: str, seq: int | None, blocked: Sequence[str]) -> None:
    """Prints where a pattern matches MODEL, or how far it fits and which of its nodes is the first not to fit."""
    plugins = load_plugins(blocked)
    pattern = plugins.pattern(name)
    with output.progress(f"tracing {model}"):
        graph = model_graph(model, BATCH, seq)
    report = match_report(graph, pattern, plugins.patterns, plugins.op_names)
    output.result(report.to_dict(), str(report))


def _by_kind(rows: Sequence[PluginRow]) -> dict[str, list[dict[str, str]]]:
    """Rows under the plural of what they are; an entry point that gave nothing stands among the patterns."""
    found: dict[str, list[dict[str, str]]] = {"patterns": [], "devices": [], "cost_models": [], "op_names": []}
    for row in rows:
        found["patterns" if row.kind == "plugin" else f"{row.kind}s"].append(asdict(row))
    return found


def _with_remark(row: PluginRow, plugins: Plugins) -> PluginRow:
    """An active pattern that can never match says why."""
    if row.kind != "pattern" or row.state != "active":
        return row
    unknown = unknown_ops(plugins.pattern(row.name), plugins.op_names)
    return replace(row, reason=f"it can match custom ops only: {spell_unknown(unknown)}") if unknown else row


def _source(row: PluginRow) -> str:
    return f"{row.distribution} {row.version}".rstrip()


def _table(source: str, kind: str, rows: Sequence[PluginRow]) -> RenderableType:
    table = make_table(kind, "state", "entry point")
    for row in rows:
        _, _, module = row.entry_point.partition(" = ")
        table.add_row(row.name, Text(row.state, style=_STYLES[row.state]), module)
    return titled(source, table)


def _remark(row: PluginRow) -> Text:
    return Text(f"{row.name} of {_source(row)} is {row.state}: {row.reason}", style=_STYLES[row.state])
