"""Speed, scale and judgement of the search. Nothing is executed on devices; Paddle's import is not counted.

    python benchmarks/search.py --speed             GPT-3 175B and LLaMA-3 405B, the levels, time and memory
    python benchmarks/search.py --curve             time over layers and devices
    python benchmarks/search.py --experts FILE      published configurations against what the planner finds
    python benchmarks/search.py --reference PYTHON  24-layer GPT on one machine of 8 against Paddle's own tuner, run by PYTHON,
                                                    an interpreter with paddlepaddle 3.1.1

Every measurement runs in a process of its own, so that peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import experts
import paddle

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.handover.configs import config_graph
from paddle_rbt_plugin.models import GPTConfig, build, input_spec, named_config
from paddle_rbt_plugin.tuner import tune_graph

REFERENCE_LAYERS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--curve", action="store_true")
    parser.add_argument("--experts", type=Path)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        what = json.loads(arguments.measure)
        print("RESULT" + json.dumps(measure_program(what["program"]) if "program" in what else measure(**what)))
    if arguments.speed:
        speed()
    if arguments.curve:
        curve()
    if arguments.experts:
        experts.show(arguments.experts)
    if arguments.reference:
        reference(arguments.reference)


def measure(model: Any, cluster: str, batch: int, level: str = "o1", space: Any = None) -> dict[str, Any]:
    """Plans once; seconds by part, and the most memory the process had."""
    start, cpu = time.perf_counter(), time.process_time()
    graph = config_graph(named_config(model) if isinstance(model, str) else GPTConfig(**model), batch)
    traced, traced_cpu = time.perf_counter(), time.process_time()
    precision = "bf16" if "100" in cluster and "V100" not in cluster else "fp16"
    plan = tune_graph(
        graph, Settings(cluster=cluster, level=level, search_space=space), precision=precision, global_batch=batch
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
    plan = rbt.tune(program, cluster="1x8:V100-32G", precision="fp16", search_space=space)
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


def speed() -> None:
    """Whole plans, tracing included."""
    rows = [
        ("gpt3-175b", "128x8:A100-80G", 1536, "o1"),
        ("gpt3-175b", "128x8:A100-80G", 1536, "o2"),
        ("llama3-405b", "2048x8:H100", 2048, "o1"),
        ("gpt3-13b", "2x8:A100-80G+2x8:V100-32G", 256, "o3"),
    ]
    print(f"{'model':<13}{'cluster':<28}{'level':<7}{'wall s':>8}{'CPU s':>8}{'tracing s':>11}{'GiB':>6}  plan")
    for model, cluster, batch, level in rows:
        r = measured(model=model, cluster=cluster, batch=batch, level=level)
        print(
            f"{model:<13}{cluster:<28}{level:<7}{r['wall_s']:>8.2f}{r['cpu_s']:>8.2f}{r['tracing_s']:>11.2f}"
            f"{r['memory_gib']:>6.2f}  {r['plan']}",
            flush=True,
        )


def curve() -> None:
    """CPU seconds over the depth of a model and over the devices of a cluster."""
    shape = {"hidden": 4096, "ffn": 16384, "heads": 32, "vocab": 50304, "seq": 2048}
    print("layers on 16x8:A100-80G, global batch 512:   CPU s (wall s)")
    for layers in (12, 24, 48, 96, 192):
        r = measured(model=shape | {"layers": layers}, cluster="16x8:A100-80G", batch=512)
        print(f"{layers:>8}  {r['cpu_s']:6.2f} ({r['wall_s']:.2f})", flush=True)
    print("devices, 48 layers, global batch 4096:   CPU s (wall s)")
    for machines in (1, 4, 16, 64, 256, 1024, 2048):
        r = measured(model=shape | {"layers": 48}, cluster=f"{machines}x8:A100-80G", batch=4096)
        print(f"{machines * 8:>8}  {r['cpu_s']:6.2f} ({r['wall_s']:.2f})", flush=True)


def reference(python: Path) -> None:
    """Paddle's own tuner and this one, both from a program of all layers in memory to the plan."""
    script = Path(__file__).with_name("reference_tuner.py")
    run = subprocess.run([str(python), "-W", "ignore", str(script), str(REFERENCE_LAYERS)], capture_output=True, text=True)
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        raise SystemExit(f"the reference failed:\n{run.stderr[-2000:]}")
    theirs = json.loads(lines[0].removeprefix("RESULT"))
    ours = measured(program=REFERENCE_LAYERS)
    print(f"{REFERENCE_LAYERS} layers on 1x8, from the traced program on: reference {theirs['tune_s']:.1f} s ", end="")
    print(f"(CPU {theirs['tune_cpu_s']:.1f} s), here {ours['tuning_s']:.2f} s (CPU {ours['tuning_cpu_s']:.2f} s): ", end="")
    print(f"{theirs['tune_s'] / ours['tuning_s']:.0f} times faster, {theirs['tune_cpu_s'] / ours['tuning_cpu_s']:.0f} by CPU")


if __name__ == "__main__":
    main()
