"""Where a command's result, its messages and its progress go.

The result goes to stdout, as tables or as JSON and nothing else; messages, warnings and progress go to stderr. Tables fit the
terminal, and 80 columns where there is none. Progress shows on a terminal only, and leaves nothing behind.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import click
from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text


class Report(Protocol):
    """Called with the number of steps done and their total, and with what to say under the title."""

    def __call__(self, done: int, total: int, detail: str = "") -> None: ...


@dataclass(frozen=True)
class Output:
    """How the user wants to be told."""

    json: bool = False
    quiet: bool = False
    """Nothing but the result and errors."""
    verbose: bool = False
    """Paddle's own warnings too."""
    color: bool = True
    file: Any = field(default_factory=lambda: sys.stdout, repr=False)
    """Where the result goes, also while what plugins print goes to stderr."""

    @cached_property
    def _stdout(self) -> Console:
        return self._console(self.file)

    @cached_property
    def _stderr(self) -> Console:
        return self._console(sys.stderr)

    def _console(self, file: Any) -> Console:
        return Console(file=file, color_system="auto" if self.color else None, highlight=False, markup=False, emoji=False)

    def result(self, data: Mapping[str, Any], *tables: RenderableType) -> None:
        """Prints ``data`` as JSON where that is wanted, else ``tables``; text among them is printed as it is, unwrapped."""
        if self.json:
            click.echo(json.dumps(data, indent=1), file=self.file)
            return
        for table in tables:
            self._stdout.print(table, soft_wrap=isinstance(table, (str, Text)))

    def note(self, text: str, style: str = "") -> None:
        """A message on stderr, unless the user wants quiet."""
        if not self.quiet:
            self._stderr.print(Text(text, style=style), soft_wrap=True)

    def warn(self, text: str) -> None:
        self.note(f"warning: {text}", style="yellow")

    @contextmanager
    def progress(self, title: str) -> Iterator[Report]:
        """Shows how far a task is; without a call of the report only that it runs."""
        text = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
        columns = (SpinnerColumn(), text, BarColumn(bar_width=20), TimeElapsedColumn(), TimeRemainingColumn())
        shown = self._stderr.is_terminal and not self.quiet
        with Progress(*columns, console=self._stderr, transient=True, disable=not shown, expand=True) as progress:
            task = progress.add_task(title, total=None)

            def report(done: int, total: int, detail: str = "") -> None:
                progress.update(task, completed=done, total=total, description=f"{title}\n{detail}" if detail else title)

            yield report

    @contextmanager
    def warnings(self) -> Iterator[None]:
        """Turns Python warnings into messages; those of Paddle itself are shown only when the user wants them."""
        with warnings.catch_warnings():
            warnings.filterwarnings("always", module=r"paddle_rbt_")
            if not self.verbose:
                warnings.filterwarnings("ignore", module=r"paddle\.")
                warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.showwarning = lambda message, *_: self.warn(str(message))
            with redirect_stdout(sys.stderr):  # what plugins and models print is no result
                yield


def make_table(*columns: str, right: tuple[str, ...] = (), gap: int = 3) -> Table:
    """An empty table as all commands draw it; ``right`` are the columns of numbers, ``gap`` the space between columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, (gap - 1) // 2))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def titled(title: str, table: Table) -> Group:
    """A table under a title, which may be wider than the table."""
    return Group(Text(title, style="bold"), table)
