"""The commands: their names, arguments and help. What each does stands in the module that it calls."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from typing import Any

import click

from paddle_rbt_plugin.cli.output import Output
from paddle_rbt_plugin.errors import TunerError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells give it."""


class _Failure(click.ClickException):
    """A TunerError as the user sees it: one message on stderr, exit code 1."""

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {self.message}", err=True)


class _Commands(click.Group):
    """A group that answers a misspelt command with the nearest, and errors with a message instead of a traceback."""

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
        except TunerError as error:
            raise _Failure(str(error)) from error
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)


class _Assignment(click.ParamType):
    """``key=value``, the value an int, true, false, a word, or several of them with commas between."""

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


def _with_output(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that every command has; the command gets an Output as its first argument."""

    @click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else on stdout.")
    @click.option("--quiet", "-q", is_flag=True, help="Print the result and errors only.")
    @click.option("--verbose", "-v", is_flag=True, help="Print Paddle's own warnings too.")
    @click.option("--no-color", is_flag=True, help="Use no colours. The variable NO_COLOR does the same.")
    @functools.wraps(command)
    def run(as_json: bool, quiet: bool, verbose: bool, no_color: bool, **arguments: Any) -> Any:
        output = Output(as_json, quiet, verbose, color=not no_color)
        with output.warnings():
            return command(output, **arguments)

    return run


_set = click.option(
    "--set",
    "fixed",
    type=_Assignment(),
    multiple=True,
    metavar="KEY=VALUE",
    help="Fix or list values of a dimension: mp=2, micro_batch=1,2,4, recompute=auto.",
)
_no_plugin = click.option(
    "--no-plugin", "blocked", multiple=True, metavar="NAME", help="Leave out a pattern, an entry point or a distribution."
)
_batch = click.option("--global-batch", type=click.IntRange(1, 2**24), required=True, help="Samples of one optimizer step.")


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="paddle-rbt-plugin", prog_name="paddle-rbt")
def cli() -> None:
    """Finds parallel strategies for PaddlePaddle models.

    \b
    Examples:
      paddle-rbt plan gpt3-1.3b --cluster 1x8:A100-80G --global-batch 64
      paddle-rbt patterns
      paddle-rbt demo
    """


@cli.command()
@click.argument("model")
@click.option("--cluster", required=True, help="NODESxDEVICES:GPU, such as 4x8:A100-80G, or a cluster file.")
@_batch
@click.option("--seq", type=click.IntRange(1, 2**24), help="Tokens per sequence, where not those of the config.")
@click.option("--level", default="o1", show_default=True, help="How hard to search.")
@_set
@click.option(
    "--precision", type=click.Choice(["bf16", "fp16", "fp32"]), help="Of training; the best of the devices by default."
)
@click.option("--cost-model", default="analytic", show_default=True, help="What predicts time and memory.")
@click.option(
    "--time-limit", type=click.FloatRange(0, min_open=True), metavar="SECONDS", help="End the search with the best plan so far."
)
@click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="Candidates to show.")
@click.option("--save", type=click.Path(dir_okay=False), help="Write the plan to this file.")
@_no_plugin
@_with_output
def plan(output: Output, **arguments: Any) -> None:
    """Find the best parallel strategy for MODEL.

    MODEL is a published model by name (gpt3-1.3b, llama2-7b, ...), a config file of your own (YAML), a saved PIR program
    (JSON), or package.module:function. The function is called without arguments and returns the forward pass with its loss:
    a static Program, or a tuple (layer, input_spec) whose forward returns the loss, or (layer, input_spec, loss,
    labels_spec). It runs under paddle.LazyGuard, so nothing is allocated.

    \b
    Examples:
      paddle-rbt plan gpt3-1.3b --cluster 1x8:A100-80G --global-batch 64
      paddle-rbt plan llama2-7b --cluster 2x8:H100 --global-batch 256 --set mp=2,4 --set pp=1
      paddle-rbt plan my_config.yaml --cluster my_cluster.yaml --global-batch 32 --save plan.json
      paddle-rbt plan my_package.model:build --cluster 1x8:H100 --global-batch 64 --json
    """
    from paddle_rbt_plugin.cli.planning import plan_model

    plan_model(output, **arguments)


@cli.command()
@click.argument("plan", type=click.Path())
@click.option("--tensor", help="Explain one tensor, by its name or its path in named_parameters().")
@click.option("--verify", is_flag=True, help="Compare the prediction with the program that Paddle partitions.")
@click.option("--model", help="With --verify: the MODEL of the plan, where the plan does not say or it has moved.")
@_with_output
def explain(output: Output, plan: str, tensor: str | None, verify: bool, model: str | None) -> None:
    """Say why PLAN, a saved plan, is what it is.

    With --verify the model is traced again and partitioned by Paddle for one rank; collectives, bytes and FLOP of that
    program are compared with those that the cost was computed from, and the exit code is 1 if anything differs.

    \b
    Examples:
      paddle-rbt explain plan.json
      paddle-rbt explain plan.json --tensor gpt.layers.0.attn.q_proj.weight
      paddle-rbt explain plan.json --verify
    """
    if verify:
        from paddle_rbt_plugin.cli.verifying import verify_file

        if not verify_file(output, plan, model):
            click.get_current_context().exit(1)
        return
    from paddle_rbt_plugin.cli.planning import explain_file

    explain_file(output, plan, tensor)


@cli.command()
@_no_plugin
@_with_output
def patterns(output: Output, blocked: tuple[str, ...]) -> None:
    """List the patterns of all installed plugins, and the plugins that are broken.

    \b
    Examples:
      paddle-rbt patterns
      paddle-rbt patterns --no-plugin qkv --json
    """
    from paddle_rbt_plugin.cli.patterns import list_patterns

    list_patterns(output, blocked)


@cli.command()
@click.option("--runs", required=True, type=click.Path(), metavar="FILE.csv", help="Table of training runs, one per row.")
@_with_output
def estimate(output: Output, runs: str) -> None:
    """Predict step time and peak memory of every training run in a table.

    Columns, in any order, where empty means the default and others are ignored: id, gpu, gpus, gpus_per_node (8), layers,
    hidden, ffn (4 x hidden), heads, kv_heads (heads), vocab, seq, arch (gpt, or llama), tp, pp, dp, cp, sharding (none, or
    stage1 to stage3), vpp, mbs, gbs, precision (fp16, bf16, fp32), recompute (none, selective, full), seq_parallel (0, 1),
    inter_node_GBps (of a machine, in one direction).

    \b
    Examples:
      paddle-rbt estimate --runs runs.csv
      paddle-rbt estimate --runs runs.csv --json
    """
    from paddle_rbt_plugin.cli.estimating import estimate_file

    estimate_file(output, runs)


@cli.command()
@click.option("--processes", type=click.IntRange(2), default=2, show_default=True, help="CPU processes to train with.")
@_set
@click.option("--steps", type=click.IntRange(1), default=20, show_default=True, help="AdamW steps.")
@click.option("--timeout", type=click.IntRange(1), default=150, show_default=True, help="Seconds for all processes to end.")
@_with_output
def demo(output: Output, **arguments: Any) -> None:
    """Train a small GPT with several CPU processes under a found plan, beside a serial run.

    Prints both losses step by step; the exit code is 1 where they differ by more than 1e-5.

    \b
    Examples:
      paddle-rbt demo
      paddle-rbt demo --processes 4 --set mp=4
      paddle-rbt demo --processes 4 --set dp=2 --set mp=2 --json
    """
    from paddle_rbt_plugin.cli.demo import run_demo

    run_demo(output, **arguments)


@cli.command()
@click.option("--output", "path", type=click.Path(dir_okay=False), metavar="FILE", help="Write the profile to this file.")
@click.option(
    "--processes", type=click.IntRange(1), help="Devices that compute at the same time; all, or one per CPU core, by default."
)
@click.option("--timeout", type=click.IntRange(1), default=600, show_default=True, help="Seconds for all processes to end.")
@_with_output
def calibrate(output: Output, path: str | None, processes: int | None, timeout: int) -> None:
    """Measure the devices of this machine and write their profile, a file for --cluster.

    Times matrix products, memory-bound ops, launches and collectives while as many processes do the same, and fits the rates
    and latencies that the cost model computes with. On a machine without GPUs the devices are CPU processes, which share its
    cores: a profile holds for as many processes as were measured. Keep the machine free of other work meanwhile.

    \b
    Examples:
      paddle-rbt calibrate --output cluster.yaml
      paddle-rbt calibrate --processes 4 --output 1x4.yaml
      paddle-rbt plan gpt3-125m --cluster cluster.yaml --global-batch 8
    """
    from paddle_rbt_plugin.cli.calibrating import calibrate_devices

    calibrate_devices(output, path, processes, timeout)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits: 0 success, 1 a TunerError, 2 wrong usage, 130 Ctrl-C."""
    cli.main(arguments, prog_name="paddle-rbt")
