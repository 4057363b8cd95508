"""The commands: their names, arguments and help. Each calls a module that does the work."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import get_completion_class

from paddle_rbt_cli.group import Commands
from paddle_rbt_cli.options import (
    DEVICES,
    batch_option,
    common_options,
    complete_cases,
    complete_models,
    no_plugin_option,
    set_option,
    with_output,
)

if TYPE_CHECKING:
    from paddle_rbt_plugin.cli.output import Output

COMPLETION_VARIABLE = "_PADDLE_RBT_COMPLETE"


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="paddle-rbt-plugin", prog_name="paddle-rbt")
def cli() -> None:
    """Find parallel strategies for PaddlePaddle models. Start with plan.

    \b
    Examples:
      paddle-rbt plan gpt3-1.3b --cluster 1x8:A100-80G --global-batch 64
      paddle-rbt patterns
      paddle-rbt demo
    """


@cli.command(short_help="Find the best parallel strategy for a model.")
@click.argument("model", shell_complete=complete_models)
@click.option(
    "--cluster",
    required=True,
    help="NODESxDEVICES:GPU, such as 4x8:A100-80G, several kinds of machines joined by +; or a cluster file. GPU is "
    f"{DEVICES}, or one that a plugin adds.",
)
@batch_option
@click.option("--seq", type=click.IntRange(1, 2**24), help="Tokens per sequence, instead of the config's.")
@click.option(
    "--level",
    metavar="[o1|o2|o3]",
    default="o1",
    show_default=True,
    help="o1: one strategy for all layers. o2: one strategy per layer, and uneven stages. o3: also the best order of groups of "
    "different machines. Each level is at least as good as the one before, and takes longer.",
)
@set_option
@click.option(
    "--precision",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    help="Training precision. By default bf16 if it is faster on all devices, else fp16, else fp32.",
)
@click.option(
    "--cost-model",
    metavar="NAME",
    default="analytic",
    show_default=True,
    help="The cost model that predicts time and memory; paddle-rbt patterns lists those of plugins.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="End the search after this time with the best plan so far; by default there is no limit.",
)
@click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="Number of candidates to show.")
@click.option(
    "--cache",
    metavar="FOLDER|off",
    help="Folder in which answers of Paddle are cached, which makes later plans faster. By default PADDLE_RBT_CACHE, else the "
    "user's cache folder.",
)
@click.option(
    "--save",
    type=click.Path(dir_okay=False),
    metavar="FILE.json",
    help="Write the plan to this file, for explain and for strategy.tuning.load_path.",
)
@no_plugin_option
@with_output
def plan(output: Output, **arguments: Any) -> None:
    """Find the best parallel strategy for MODEL.

    MODEL is a published model by name (gpt3-1.3b, qwen3-8b, ...; paddle-rbt models lists them), a config file of your own
    (YAML), a config.json of Hugging Face, a saved PIR program (JSON), or package.module:function. The function takes no
    arguments and returns the forward pass with its loss: a static Program, or a tuple (layer, input_spec) whose forward returns
    the loss, or (layer, input_spec, loss, labels_spec). It runs under paddle.LazyGuard, so no parameters are allocated.

    \b
    Dimensions of --set; those that are not set are searched:
      pp, dp, mp         pipeline stages, replicas, tensor-parallel ranks;
                         their product is the number of devices
      ep                 ranks of dp that share experts: 1, or as many as dp
      micro_batch        samples of a replica in one pass
      accumulate_steps   passes of a step: global batch / dp / micro_batch
      recompute          none, selective (attention core), full
      sharding_stage     ZeRO stage: 0 to 3
      sharding_degree    replicas that share the states: whole, or a number
      sequence_parallel  true, false
      schedule           1F1B, FThenB, VPP (interleaved)
      vpp                chunks per stage of VPP
      order              dp_mp, mp_dp: the last axis runs inside machines
      layer_meshes       level o2: one, any

    \b
    Examples:
      paddle-rbt plan gpt3-1.3b --cluster 1x8:A100-80G --global-batch 64
      paddle-rbt plan llama2-7b --cluster 2x8:H100 --global-batch 256 \\
          --set mp=2,4 --set pp=1
      paddle-rbt plan my_config.yaml --cluster my_cluster.yaml \\
          --global-batch 32 --save plan.json
      paddle-rbt plan config.json --seq 8192 --cluster 4x8:H100 \\
          --global-batch 512
      paddle-rbt plan my_package.model:build --cluster 1x8:H100 \\
          --global-batch 64 --json
    """
    from paddle_rbt_plugin.cli.planning import plan_model

    plan_model(output, **arguments)


@cli.command(short_help="List the models that plan knows by name.")
@with_output
def models(output: Output) -> None:
    """List the models that plan takes by name: parameters, those that one token uses, layers, hidden size, heads, heads of keys
    and values, and tokens of a training sequence. --json also says where the numbers come from.

    \b
    Examples:
      paddle-rbt models
      paddle-rbt models --json
    """
    from paddle_rbt_plugin.cli.models import list_models

    list_models(output)


@cli.command(short_help="Explain a saved plan.")
@click.argument("plan", type=click.Path())
@click.option("--tensor", metavar="NAME", help="Explain one tensor, by its name or its path in named_parameters().")
@click.option("--verify", is_flag=True, help="Compare the prediction with the program that Paddle partitions.")
@click.option(
    "--model", metavar="MODEL", help="With --verify: the MODEL of the plan, if the plan does not name it or it has moved."
)
@with_output
def explain(output: Output, plan: str, tensor: str | None, verify: bool, model: str | None) -> None:
    """Explain PLAN, a file written by plan --save: its stages, the breakdown of step time and memory, where its axes
    communicate, the next best candidates, and what was rejected and why. --tensor explains the placement of one tensor.

    With --verify, Paddle partitions the model for one rank, and the collectives, bytes and FLOP of that program are compared
    with those that the cost was computed from. The exit code is 1 if anything differs.

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


@cli.command(short_help="List patterns and other plugins, or match one.")
@click.option("--why-not", metavar="NAME", help="Show where this pattern matches a model, or the first op that does not fit.")
@click.option("--model", metavar="MODEL", help="With --why-not: the MODEL, as for plan.", shell_complete=complete_models)
@click.option("--seq", type=click.IntRange(1, 2**24), help="With --why-not: tokens per sequence, as for plan.")
@no_plugin_option
@with_output
def patterns(output: Output, why_not: str | None, model: str | None, seq: int | None, blocked: tuple[str, ...]) -> None:
    """List the patterns and everything else that installed plugins register, and broken plugins.

    With --why-not, one pattern is matched against a model. If it matches nowhere, the command shows how far it fits at best,
    the first node or attribute that does not fit, and the nearest op of the model.

    \b
    Examples:
      paddle-rbt patterns
      paddle-rbt patterns --no-plugin qkv --json
      paddle-rbt patterns --why-not gated_ffn --model gpt3-1.3b
    """
    if (why_not is None) != (model is None) or (seq is not None and model is None):
        raise click.UsageError("--why-not NAME and --model MODEL go together, and --seq with them")
    from paddle_rbt_plugin.cli.patterns import explain_pattern, list_patterns

    if why_not is not None and model is not None:
        explain_pattern(output, why_not, model, seq, blocked)
    else:
        list_patterns(output, blocked)


@cli.command(short_help="Predict time and memory of training runs.")
@click.option("--runs", required=True, type=click.Path(), metavar="FILE.csv", help="Table with one training run per row.")
@with_output
def estimate(output: Output, runs: str) -> None:
    """Predict step time and peak memory of every training run in a table.

    Columns may be in any order; unknown ones are ignored. Defaults, which also stand for empty cells, are in brackets; columns
    without a default are required.

    \b
      gpu, gpus           device as in plan --cluster, and how many of them
      layers, hidden, heads, vocab, seq
      mbs, gbs            samples: of a replica in one pass, of a step
      id                  (number of the row)
      gpus_per_node       (8)
      arch                gpt, llama (gpt)
      ffn, kv_heads       (4 x hidden; heads)
      tp, pp, cp, vpp     tensor parallel ranks, pipeline stages, context
                          parallel ranks, chunks per stage (1)
      dp                  replicas (gpus / tp / pp / cp)
      sharding            ZeRO: none, stage1, stage2, stage3 (none)
      precision           fp16, bf16, fp32 (fp16)
      recompute           none, selective, full (none)
      seq_parallel        0, 1 (0)
      inter_node_GBps     GB/s of a machine in one direction (the device's)

    \b
    Examples:
      paddle-rbt estimate --runs runs.csv
      paddle-rbt estimate --runs runs.csv --json
    """
    from paddle_rbt_plugin.cli.estimating import estimate_file

    estimate_file(output, runs)


@cli.command(short_help="Compare plans for published models with experts' choices.")
@click.argument("cases", nargs=-1, metavar="[CASE]...", shell_complete=complete_cases)
@click.option("--list", "listed", is_flag=True, help="List the cases without running any.")
@click.option(
    "--reference/--no-reference", default=True, show_default=True, help="Also run Paddle's own tuner, which takes minutes."
)
@click.option(
    "--reference-limit",
    type=click.FloatRange(0, min_open=True),
    default=200,
    show_default=True,
    metavar="SECONDS",
    help="Time limit for Paddle's own tuner, for all cases together.",
)
@click.option("--save", type=click.Path(dir_okay=False), metavar="FILE.json", help="Write the results to this file.")
@click.option("--markdown", type=click.Path(dir_okay=False), metavar="FILE.md", help="Write the tables to this file.")
@click.option("--plot", type=click.Path(dir_okay=False), metavar="FILE.svg", help="Draw the MFU of every case (svg, png, pdf).")
@click.option("--compare", nargs=2, type=click.Path(), metavar="A.json B.json", help="Show what changed between two results.")
@with_output
def bench(output: Output, listed: bool, compare: tuple[str, str] | None, **arguments: Any) -> None:
    """Plan published models on the clusters that they were trained on, and compare the plans with the choices of experts.

    CASE is the name of a case (see --list), or a file of your own in the same format (YAML: model, cluster, global_batch and
    optionally seq, precision, level, search_space, training, experts). By default all cases are run. The result shows our plan
    with its predicted time, memory and MFU, and the published strategies and the choice of Paddle's own tuner under the same
    cost model.

    \b
    Examples:
      paddle-rbt bench --save results.json --markdown results.md \\
          --plot results.svg
      paddle-rbt bench gpt-39b llama2-70b --no-reference
      paddle-rbt bench my_case.yaml --json
      paddle-rbt bench --compare before.json after.json
    """
    run = any(arguments[name] not in (None, ()) for name in ("cases", "save", "markdown", "plot"))
    if bool(compare) + listed + run > 1:
        raise click.UsageError(
            "--list and --compare A.json B.json run no cases, so they cannot be combined with each other, CASE or files to "
            "write"
        )
    from paddle_rbt_plugin.cli.benching import compare_files, list_cases, run_suite

    if compare:
        compare_files(output, *compare)
    elif listed:
        list_cases(output)
    else:
        run_suite(output, **arguments)


@cli.command(short_help="Train a small GPT on CPU processes under a plan.")
@click.option("--processes", type=click.IntRange(2), default=2, show_default=True, help="CPU processes to train with.")
@set_option
@click.option("--steps", type=click.IntRange(1), default=20, show_default=True, help="Number of AdamW steps.")
@click.option(
    "--timeout", type=click.IntRange(1), default=150, show_default=True, help="Time limit in seconds for all processes."
)
@with_output
def demo(output: Output, **arguments: Any) -> None:
    """Plan a small GPT, train it with several CPU processes under the plan, and compare with a serial run.

    Prints both losses step by step; the exit code is 1 if they differ by more than 1e-5.

    \b
    Examples:
      paddle-rbt demo
      paddle-rbt demo --processes 4 --set mp=4
      paddle-rbt demo --processes 4 --set dp=2 --set mp=2 --json
    """
    from paddle_rbt_plugin.cli.demo import run_demo

    run_demo(output, **arguments)


@cli.command(short_help="Measure this machine for plan --cluster.")
@click.option(
    "--output",
    "path",
    type=click.Path(dir_okay=False),
    metavar="FILE.yaml",
    help="Write the profile to this file instead of printing it.",
)
@click.option(
    "--processes",
    type=click.IntRange(1),
    help="Devices that work at the same time; by default all GPUs, or one process per CPU core.",
)
@click.option(
    "--rounds", type=click.IntRange(1), default=5, show_default=True, help="How often everything is measured; medians are used."
)
@click.option(
    "--timeout", type=click.IntRange(1), default=600, show_default=True, help="Time limit in seconds for all processes."
)
@with_output
def calibrate(output: Output, path: str | None, processes: int | None, timeout: int, rounds: int) -> None:
    """Measure the devices of this machine and write a profile for --cluster.

    Times matrix products, memory-bound ops, launches and collectives in all processes at the same time, and fits the rates and
    latencies that the cost model uses. On a machine without GPUs the devices are CPU processes that share its cores, so a
    profile is valid for the number of processes that were measured. Keep the machine idle meanwhile.

    \b
    Examples:
      paddle-rbt calibrate --output cluster.yaml
      paddle-rbt calibrate --processes 4 --output 1x4.yaml
      paddle-rbt plan gpt3-125m --cluster cluster.yaml --global-batch 8
    """
    from paddle_rbt_plugin.cli.calibrating import calibrate_devices

    calibrate_devices(output, path, processes, timeout, rounds)


@cli.command(short_help="Print a shell completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@common_options
def completion(shell: str, as_json: bool, **_: bool) -> None:
    """Print the script that makes SHELL complete commands, options and names of models.

    \b
    Examples:
      paddle-rbt completion bash >> ~/.bashrc
      paddle-rbt completion zsh >> ~/.zshrc
      paddle-rbt completion fish > ~/.config/fish/completions/paddle-rbt.fish
    """
    completer = get_completion_class(shell)
    assert completer is not None  # it is one of the choices
    script = completer(cli, {}, "paddle-rbt", COMPLETION_VARIABLE).source()
    click.echo(json.dumps({"shell": shell, "script": script}) if as_json else script)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits: 0 success, 1 a TunerError, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM."""
    cli.main(arguments, prog_name="paddle-rbt", complete_var=COMPLETION_VARIABLE)
