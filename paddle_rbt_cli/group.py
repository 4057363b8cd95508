"""How the command line reports errors, instead of with a traceback."""

from __future__ import annotations

import difflib
import sys
from typing import Any

import click

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells give it."""


class Failure(click.ClickException):
    """An error as the user sees it: one message on stderr, exit code 1."""

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {self.message}", err=True)


class Commands(click.Group):
    """A group that suggests the nearest name for a misspelt command, and reports errors with a message instead of a
    traceback."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            names = self.list_commands(ctx)
            near = difflib.get_close_matches(args[0], names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(names)}"
            raise click.UsageError(f"no command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            click.echo("interrupted", err=True)
            ctx.exit(getattr(error, "exit_code", INTERRUPTED))  # SIGTERM has one of its own
        except Exception as error:
            if _is_for_the_user(error):
                raise Failure(str(error)) from error
            raise


def _is_for_the_user(error: Exception) -> bool:
    """Whether this is a TunerError, or Paddle is not installed. If the module of errors was never imported, none of them was
    raised."""
    errors = sys.modules.get("paddle_rbt_plugin.errors")
    is_tuner_error = errors is not None and isinstance(error, errors.TunerError)
    return is_tuner_error or (isinstance(error, ModuleNotFoundError) and error.name == "paddle")
