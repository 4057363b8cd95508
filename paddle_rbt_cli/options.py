"""Options that several commands share, and completion of their values."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

DEVICES = "V100-16G, V100-32G, A100-40G, A100-80G, A800-80G, H100, H800, H20, H200, B200, CPU"
"""The names in the device catalogue, listed here so that help need not import it."""


class Assignment(click.ParamType):
    """``key=value``; the value is an int, true, false or a word, or several of these separated by commas."""

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        if isinstance(value, tuple):
            return value
        key, equals, text = value.partition("=")
        words = [word.strip() for word in text.split(",")]
        if not key.strip() or not equals or not all(words):
            self.fail(f"{value!r} is not of the form key=value, such as mp=2, micro_batch=1,2,4 or recompute=auto", param, ctx)
        values = [_plain(word) for word in words]
        return key.strip(), values[0] if len(values) == 1 else values


def _plain(word: str) -> Any:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        return int(word)
    except ValueError:
        return word


def common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that every command has."""
    for option in (
        click.option("--no-color", is_flag=True, help="Disable colours, like the variable NO_COLOR."),
        click.option("--verbose", "-v", is_flag=True, help="Also print Paddle's own warnings."),
        click.option("--quiet", "-q", is_flag=True, help="Print only the result and errors."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else on stdout."),
    ):
        command = option(command)
    return command


def with_output(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the common options to a command, which receives an Output made from them as its first argument."""

    @common_options
    @functools.wraps(command)
    def run(as_json: bool, quiet: bool, verbose: bool, no_color: bool, **arguments: Any) -> Any:
        if not verbose:  # before Paddle is imported: its log messages are of no use to users
            os.environ.setdefault("GLOG_minloglevel", "2")
        from paddle_rbt_plugin.cli.output import Output

        output = Output(as_json, quiet, verbose, color=not no_color)
        with output.warnings():
            return command(output, **arguments)

    return run


def _one_each(ctx: click.Context, param: click.Parameter, assignments: tuple[tuple[str, Any], ...]) -> Any:
    keys = [key for key, _ in assignments]
    for key in keys:
        if keys.count(key) > 1:
            raise click.BadParameter(f"{key} is set more than once; list its values with commas: --set {key}=1,2", ctx, param)
    return assignments


set_option = click.option(
    "--set",
    "fixed",
    type=Assignment(),
    multiple=True,
    callback=_one_each,
    metavar="KEY=VALUE",
    help="Fix a dimension of the search or list its values: mp=2, micro_batch=1,2,4; auto means all values. Repeat for each "
    "dimension; plan --help lists them.",
)
no_plugin_option = click.option(
    "--no-plugin",
    "blocked",
    multiple=True,
    metavar="NAME",
    help="Leave out a pattern, a plugin (entry point) or a package (distribution). Can be repeated.",
)
batch_option = click.option(
    "--global-batch",
    type=click.IntRange(1, 2**24),
    required=True,
    help="Samples (sequences) per optimizer step, on all devices together.",
)


def complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of published models, for shell completion."""
    return _names("models/configs", incomplete)


def complete_cases(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of benchmark cases, for shell completion."""
    return _names("bench/cases", incomplete)


def _names(folder: str, incomplete: str) -> list[str]:
    spec = find_spec("paddle_rbt_plugin")  # finds the package without importing it
    assert spec is not None
    roots = spec.submodule_search_locations or ()
    return sorted(p.stem for root in roots for p in Path(root, folder).glob(f"{incomplete}*.yaml"))
