"""What the guard takes beside preparing an engine.

    python benchmarks/guard.py

A GPT of 2, 12 and 24 layers is prepared for training on two CPU processes along ``dp`` and along ``mp``, with
``strategy.tuning.verify`` on and off in turn. The table shows the medians of both and their ratio, from one run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LAYERS, REPEATS, BATCH, LENGTH = (2, 12, 24), 3, 4, 64


def prepared(layers: int, axis: str, verify: bool) -> float:
    """Seconds from an engine to its program."""
    import paddle
    from paddle.distributed.fleet import auto

    import paddle_rbt_plugin  # noqa: F401
    from paddle_rbt_plugin.models import GPTConfig, build, input_spec

    paddle.disable_static()
    with paddle.utils.unique_name.guard(), paddle.static.scope_guard(paddle.static.Scope()):
        config = GPTConfig(layers=layers, hidden=64, ffn=256, heads=4, vocab=256, seq=LENGTH)
        model = build(config)
        optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
        space = {axis: 2, "pp": 1, "sharding_stage": 0, "recompute": "none"}
        tuning = {"enable": True, "pass_name": "rule_based_tuner", "search_space": space, "verify": verify}
        engine = auto.Engine(model, None, optimizer, strategy=auto.Strategy({"tuning": tuning}))
        spec = input_spec(config, BATCH)
        begin = time.perf_counter()
        engine.prepare(spec, [], mode="train")
        return time.perf_counter() - begin


def measure(out: str) -> None:
    """Run by each process; the first writes the seconds."""
    import paddle
    import paddle.distributed as dist

    paddle.set_device("cpu")
    dist.init_parallel_env()
    rows = []
    prepared(1, "dp", True)  # what happens once
    for layers in LAYERS:
        for axis in ("dp", "mp"):
            pairs = [(prepared(layers, axis, True), prepared(layers, axis, False)) for _ in range(REPEATS)]
            rows.append([layers, axis, *(statistics.median(column) for column in zip(*pairs, strict=True))])
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows), encoding="utf-8")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--backend", "gloo"]
        command += ["--log_dir", folder, __file__, str(out)]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rows = json.loads(out.read_text(encoding="utf-8"))
    print("| layers | axis | with the guard, s | without, s | ratio |\n|---:|---|---:|---:|---:|")
    for layers, axis, on, off in rows:
        print(f"| {layers} | {axis} | {on:.2f} | {off:.2f} | {on / off:.2f} |")


if __name__ == "__main__":
    if "PADDLE_TRAINERS_NUM" in os.environ:
        measure(sys.argv[1])
    else:
        main()
