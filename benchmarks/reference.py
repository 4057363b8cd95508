"""Paddle's own rule-based tuner against this one, on single-machine GPTs as legacy programs.

    FLAGS_enable_pir_api=0 python benchmarks/reference.py [--layers 2 4 8 24] [--json FILE]

Three plans of each model: the reference's, ours by our cost model, and ours by Paddle's CostEstimator. All three are costed
by both models, on programs that Paddle completed in the same way, without recomputation and with one micro batch, which is
all the reference knows. Times are those of this run.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("FLAGS_enable_pir_api", "0")

import paddle
from paddle.utils import unique_name
from rich.console import Console
from rich.table import Table

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.graph.legacy import read_legacy_program
from paddle_rbt_plugin.handover.legacy.judge import judge
from paddle_rbt_plugin.models import GPTConfig, build, input_spec

CLUSTER = "1x8:V100-32G"
BATCH = 8
AS_THE_REFERENCE = {"accumulate_steps": 1, "recompute": "none"}


@dataclass(frozen=True)
class Program:
    """A serial forward program."""

    main: Any
    startup: Any
    loss: Any


@dataclass(frozen=True)
class Row:
    """One plan of one model: seconds per step and bytes per device by both models, and the seconds it took to find."""

    layers: int
    tuner: str
    degrees: str
    tuning_s: float
    paddle_step_s: float
    paddle_bytes: float
    analytic_step_s: float
    analytic_bytes: float


def gpt(layers: int) -> Program:
    config = GPTConfig(layers=layers, hidden=1024, ffn=4096, heads=16, vocab=50304, seq=1024)
    main, startup = paddle.static.Program(), paddle.static.Program()
    with rbt.legacy_static_ops(), paddle.static.program_guard(main, startup), unique_name.guard():
        model = build(config)
        loss = model(*[paddle.static.data(s.name, list(s.shape), s.dtype) for s in input_spec(config, BATCH)])
    return Program(main, startup, loss)


def optimizer() -> Any:
    return paddle.optimizer.AdamW(1e-5, grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0))


def reference(program: Program) -> dict[str, Any]:
    """The degrees that Paddle's own tuner chooses, in our words."""
    from paddle.distributed.auto_parallel.static.cluster import Cluster
    from paddle.distributed.auto_parallel.static.dist_context import DistributedContext
    from paddle.distributed.auto_parallel.static.tuner import rule_based_tuner

    rule_based_tuner.print_program_with_dist_attr = lambda *_: None  # it prints the whole program at every step
    cluster = Cluster()
    cluster.gen_default_config_cluster(node_count=1, device_count=8)
    context = DistributedContext(program.main, program.startup, optimizer(), program.loss, cluster=cluster)
    context.initialize()
    with rbt.legacy_static_ops():
        rule_based_tuner.RuleBasedTuner(context, mode="train", level="o1").tune()
    return degrees_of(context)


def degrees_of(context: Any) -> dict[str, Any]:
    block = context.serial_main_program.global_block()
    meshes: list[Any] = []
    for op in block.ops:
        attr = context.get_op_dist_attr_for_program(op)
        if attr is not None and attr.process_mesh is not None and attr.process_mesh not in meshes:
            meshes.append(attr.process_mesh)
    shape = list(meshes[0].shape)
    batch_axis = context.get_tensor_dist_attr_for_program(block.vars["tokens"]).dims_mapping[0]
    dp = shape[batch_axis] if batch_axis >= 0 else 1
    found: dict[str, Any] = {"pp": len(meshes), "dp": dp, "mp": len(meshes[0].process_ids) // dp}
    return found | ({"order": "mp_dp" if batch_axis == 1 else "dp_mp"} if len(shape) > 1 else {})


def ours(program: Program, space: dict[str, Any], cost_model: str = "analytic") -> rbt.Plan:
    how = {"loss": program.loss, "cluster": CLUSTER, "cost_model": cost_model}
    return rbt.tune(program.main, search_space=AS_THE_REFERENCE | space, **how)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def row(layers: int, tuner: str, plan: rbt.Plan, seconds: float) -> Row:
    program = gpt(layers)
    legacy = read_legacy_program(program.main, program.loss)
    theirs = judge(program.main, program.startup, program.loss, optimizer(), legacy, plan)
    degrees = " x ".join(f"{axis} {n}" for axis, n in plan.degrees.items())
    estimate = plan.estimate
    return Row(
        layers, tuner, degrees, seconds, theirs.step_time_s, theirs.peak_memory_bytes, estimate.step_time_s,
        estimate.peak_memory_bytes,
    )  # fmt: skip


def compare(layers: int) -> list[Row]:
    degrees, seconds = timed(lambda: reference(gpt(layers)))
    rows = [row(layers, "reference", ours(gpt(layers), degrees), seconds)]
    for name, model in (("ours", "analytic"), ("ours, cost_model='paddle'", "paddle")):
        plan, seconds = timed(lambda model=model: ours(gpt(layers), {}, model))
        rows.append(row(layers, name, plan, seconds))
    return rows


def show(rows: list[Row]) -> None:
    table = Table(title=f"GPT, hidden 1024, sequence 1024, batch {BATCH}, on {CLUSTER}; Paddle {paddle.__version__}")
    for name in ("layers", "tuner", "plan", "tuning s", "Paddle's ms", "GiB", "our ms", "GiB"):
        table.add_column(name, justify="left" if name in ("tuner", "plan") else "right")
    for r in rows:
        figures = (r.paddle_step_s * 1e3, r.paddle_bytes / 2**30, r.analytic_step_s * 1e3, r.analytic_bytes / 2**30)
        table.add_row(str(r.layers), r.tuner, r.degrees, f"{r.tuning_s:.1f}", *(f"{x:.2f}" for x in figures))
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8, 24])
    parser.add_argument("--json", help="also write the rows to this file")
    arguments = parser.parse_args()
    paddle.enable_static()
    rows = [r for layers in arguments.layers for r in compare(layers)]
    show(rows)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"paddle": paddle.__version__, "rows": [vars(r) for r in rows]}, file, indent=1)


if __name__ == "__main__":
    main()
