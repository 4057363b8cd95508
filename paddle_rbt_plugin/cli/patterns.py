"""``paddle-rbt patterns``."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import RenderableType
from rich.text import Text

from paddle_rbt_plugin.cli.output import Output, make_table, titled
from paddle_rbt_plugin.plugins import PluginRow, PluginWarning, load_plugins

_STYLES = {"active": "green", "broken": "red", "blocked": "yellow"}


def list_patterns(output: Output, blocked: Sequence[str]) -> None:
    """Prints every pattern with where it comes from and its state; broken plugins are rows like others."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "plugin .* is left out", PluginWarning)  # the table says so
        rows = load_plugins(blocked).rows
    tables = [_table(source, list(group)) for source, group in itertools.groupby(rows, key=_source)]
    problems = [_problem(row) for row in rows if row.reason]
    output.result({"patterns": [asdict(row) for row in rows]}, *tables, *problems)


def _source(row: PluginRow) -> str:
    return f"{row.distribution} {row.version}".rstrip()


def _table(source: str, rows: Sequence[PluginRow]) -> RenderableType:
    table = make_table("pattern", "state", "entry point")
    for row in rows:
        _, _, module = row.entry_point.partition(" = ")
        table.add_row(row.name, Text(row.state, style=_STYLES[row.state]), module)
    return titled(source, table)


def _problem(row: PluginRow) -> Text:
    return Text(f"{row.name} of {_source(row)} is {row.state}: {row.reason}", style=_STYLES[row.state])
