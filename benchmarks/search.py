"""Speed, scale and judgement of the search. Nothing is executed on devices; Paddle's import is not counted.

    python benchmarks/search.py --speed             GPT-3 175B and LLaMA-3 405B, the levels, time and memory
    python benchmarks/search.py --again             models from a package, planned twice: the second plan asks Paddle nothing
    python benchmarks/search.py --curve             time over layers and devices
    python benchmarks/search.py --experts FILE      published configurations against what the planner finds
    python benchmarks/search.py --reference PYTHON  24-layer GPT on one machine of 8 against Paddle's own tuner, run by PYTHON,
                                                    an interpreter with paddlepaddle 3.1.1

Every measurement runs in a process of its own, so that peak memory is its own, and asks Paddle everything, but for
``--again``, whose processes share a cache that is empty at first.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import experts
import paddle
from outputs import output_file

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.handover.pir.configs import config_graph
from paddle_rbt_plugin.model_reference import model_graph
from paddle_rbt_plugin.models import GPTConfig, build, input_spec, named_config
from paddle_rbt_plugin.request import Request
from paddle_rbt_plugin.tuner import tune_graph

REFERENCE_LAYERS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--curve", action="store_true")
    parser.add_argument("--experts", type=Path)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--json", type=output_file, help="also write what was measured here")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        what = json.loads(arguments.measure)
        print("RESULT" + json.dumps(measure_program(what["program"]) if "program" in what else measure(**what)))
        return
    found: dict[str, Any] = {}
    if arguments.speed:
        found["speed"] = speed()
    if arguments.again:
        found["again"] = again()
    if arguments.curve:
        found["curve"] = curve()
    if arguments.experts:
        found["experts"] = experts.show(arguments.experts)
    if arguments.reference:
        found["reference"] = reference(arguments.reference)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


def measure(model: Any, cluster: str, batch: int, level: str = "o1", space: Any = None, cache: str = "off") -> dict[str, Any]:
    """Plans once; seconds by part, and the most memory the process had. ``model`` is a name, fields of a GPT, or
    ``module:function``."""
    start, cpu = time.perf_counter(), time.process_time()
    if isinstance(model, str) and ":" in model:
        graph = model_graph(model, batch, None)
    else:
        graph = config_graph(named_config(model) if isinstance(model, str) else GPTConfig(**model), batch)
    traced, traced_cpu = time.perf_counter(), time.process_time()
    precision = "bf16" if "100" in cluster and "V100" not in cluster else "fp16"
    plan = tune_graph(
        graph,
        Request(
            Settings(cluster=cluster, level=level, search_space=space, cache=cache), precision=precision, global_batch=batch
        ),
    )
    return {
        "wall_s": time.perf_counter() - start,
        "cpu_s": time.process_time() - cpu,
        "tracing_s": traced - start,
        "tuning_s": time.perf_counter() - traced,
        "tuning_cpu_s": time.process_time() - traced_cpu,
        "memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "plan": {**plan.degrees, "micro_batch": plan.micro_batch, "recompute": plan.recompute, "vpp": plan.vpp},
        "step_time_s": plan.estimate.step_time_s,
    }


def measure_program(layers: int) -> dict[str, Any]:
    """Seconds from a program in memory, all of its layers traced, to the plan in the reference's own space: mp and pp of one
    machine, one micro batch, nothing else."""
    config = GPTConfig(layers=layers, hidden=64, ffn=256, heads=8, vocab=512, seq=64)
    paddle.enable_static()
    program = paddle.static.Program()
    with paddle.static.program_guard(program, paddle.static.Program()):
        build(config)(*[paddle.static.data(s.name, s.shape, s.dtype) for s in input_spec(config, 8)])
    space = {"recompute": "none", "sharding_stage": 0, "sequence_parallel": False, "schedule": "1F1B", "accumulate_steps": 1}
    start, cpu = time.perf_counter(), time.process_time()
    plan = rbt.tune(program, cluster="1x8:V100-32G", precision="fp16", search_space=space, cache="off")
    return {
        "tuning_s": time.perf_counter() - start,
        "tuning_cpu_s": time.process_time() - cpu,
        "considered": len(plan.candidates) + len(plan.rejected),
        "plan": plan.degrees,
    }


def measured(**what: Any) -> dict[str, Any]:
    """``measure`` in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--measure", json.dumps(what)]
    run = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        raise SystemExit(f"{what} failed:\n{run.stderr[-2000:]}")
    return json.loads(lines[0].removeprefix("RESULT"))


def row(*cells: Any, head: bool = False) -> None:
    """One row of a table in Markdown."""
    print(("\n| " if head else "| ") + " | ".join(map(str, cells)) + " |" + ("\n|" + "---|" * len(cells)) * head, flush=True)


def speed() -> list[dict[str, Any]]:
    """Whole plans, tracing included."""
    rows = [
        ("gpt3-175b", "128x8:A100-80G", 1536, "o1"),
        ("gpt3-175b", "128x8:A100-80G", 1536, "o2"),
        ("llama3-405b", "2048x8:H100", 2048, "o1"),
        ("gpt3-13b", "2x8:A100-80G+2x8:V100-32G", 256, "o3"),
    ]
    row("model", "cluster", "level", "seconds", "CPU seconds", "of these tracing", "GiB", "plan", head=True)
    found = []
    for model, cluster, batch, level in rows:
        r = {"model": model, "cluster": cluster, "level": level} | measured(
            model=model, cluster=cluster, batch=batch, level=level
        )
        found.append(r)
        times = (f"{r[key]:.1f}" for key in ("wall_s", "cpu_s", "tracing_s"))
        row(model, cluster, level, *times, f"{r['memory_gib']:.2f}", r["plan"])
    return found


def again() -> list[dict[str, Any]]:
    """Whole plans of models that a package gives, traced under LazyGuard, twice each."""
    models = ("deep_models:distinct", "deep_models:decoder")
    row("model, on 2x8:A100-80G with global batch 64", "plan", "CPU seconds", "of these tracing", head=True)
    found = []
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            for plan in ("first", "second"):
                r = {"model": model, "time": plan} | measured(model=model, cluster="2x8:A100-80G", batch=64, cache=folder)
                found.append(r)
                row(model, plan, f"{r['cpu_s']:.1f}", f"{r['cpu_s'] - r['tuning_cpu_s']:.1f}")
    return found


def curve() -> dict[str, list[dict[str, Any]]]:
    """Time over the depth of a model, and over the devices of a cluster."""
    shape = {"hidden": 4096, "ffn": 16384, "heads": 32, "vocab": 50304, "seq": 2048}
    found: dict[str, list[dict[str, Any]]] = {"layers": [], "devices": []}
    row("layers, on 16x8:A100-80G with global batch 512", "seconds", "CPU seconds", head=True)
    for layers in (12, 24, 48, 96, 192):
        r = {"layers": layers} | measured(model=shape | {"layers": layers}, cluster="16x8:A100-80G", batch=512)
        found["layers"].append(r)
        row(layers, f"{r['wall_s']:.1f}", f"{r['cpu_s']:.1f}")
    row("devices, 48 layers with global batch 4096", "seconds", "CPU seconds", head=True)
    for machines in (1, 4, 16, 64, 256, 1024, 2048):
        cluster = f"{machines}x8:A100-80G"
        r = {"devices": 8 * machines} | measured(model=shape | {"layers": 48}, cluster=cluster, batch=4096)
        found["devices"].append(r)
        row(8 * machines, f"{r['wall_s']:.1f}", f"{r['cpu_s']:.1f}")
    return found


def reference(python: Path) -> dict[str, Any]:
    """Paddle's own tuner and this one, both from a program of all layers in memory to the plan."""
    script = Path(__file__).with_name("reference_tuner.py")
    run = subprocess.run([str(python), "-W", "ignore", str(script), str(REFERENCE_LAYERS)], capture_output=True, text=True)
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        raise SystemExit(f"the reference failed:\n{run.stderr[-2000:]}")
    theirs = json.loads(lines[0].removeprefix("RESULT"))
    ours = measured(program=REFERENCE_LAYERS)
    row(f"GPT of {REFERENCE_LAYERS} layers on 1x8, from program to plan", "seconds", "CPU seconds", head=True)
    row(f"Paddle's own tuner, Paddle {theirs['paddle']}", f"{theirs['tune_s']:.1f}", f"{theirs['tune_cpu_s']:.1f}")
    row(f"here, Paddle {paddle.__version__}", f"{ours['tuning_s']:.2f}", f"{ours['tuning_cpu_s']:.2f}")
    ratios = {"wall": theirs["tune_s"] / ours["tuning_s"], "cpu": theirs["tune_cpu_s"] / ours["tuning_cpu_s"]}
    row("times as fast", f"{ratios['wall']:.0f}", f"{ratios['cpu']:.0f}")
    return {"theirs": theirs, "ours": ours, "times_as_fast": ratios}


if __name__ == "__main__":
    main()
