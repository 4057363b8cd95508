"""Trains the small GPT through ``auto.Engine`` on legacy programs; every rank writes what it saw.

    python engine_worker.py SETTINGS STEPS CLIP OUT

``SETTINGS`` is JSON: the fields of ``strategy.tuning``, or null for Paddle's own engine without the tuner. ``CLIP`` names a
clip of gradients, or is none.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.fleet import auto

sys.path.insert(0, str(Path(__file__).parent.parent / "workers"))

from entry_points import BATCH, CONFIG, Logits, Losses, Samples

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.models import build, sample_batch


def momentum(network: paddle.nn.Layer, clip: Any) -> Any:
    """An optimizer to which the size of a gradient matters."""
    return paddle.optimizer.Momentum(0.5, parameters=network.parameters(), grad_clip=clip)


OPTIMIZERS = {
    "none": lambda network: paddle.optimizer.AdamW(1e-2, parameters=network.parameters()),
    "global norm": lambda network: momentum(network, paddle.nn.ClipGradByGlobalNorm(0.05)),
    "norm": lambda network: momentum(network, paddle.nn.ClipGradByNorm(0.01)),
}


def run(settings: dict | None, steps: int, clip: str) -> dict:
    paddle.seed(2024)
    network = Logits(build(CONFIG))
    batches = [sample_batch(CONFIG, BATCH, seed) for seed in range(steps)]
    strategy = auto.Strategy()
    if settings is not None:
        for name, value in ({"enable": True, "pass_name": "rule_based_tuner"} | settings).items():
            setattr(strategy.tuning, name, value)
    optimizer = OPTIMIZERS[clip](network)
    engine = auto.Engine(network, network.model.criterion, optimizer, strategy=strategy)
    recorded = Losses()
    engine.fit(Samples(batches), batch_size=BATCH, epochs=1, verbose=0, callbacks=[recorded])
    evaluated = engine.evaluate(Samples(batches), batch_size=BATCH, verbose=0)["loss"]
    predicted = engine.predict(Samples(batches[:1]), batch_size=BATCH, verbose=0)
    plan = rbt.engine_plan(engine)
    contexts = {mode: placements(engine, mode) for mode in ("train", "eval")}
    return {
        "plan": plan and plan.to_dict(),
        "losses": recorded.losses,
        "evaluated": float(evaluated),
        "predicted": len(predicted),
        "placements": contexts,
    }


def placements(engine: auto.Engine, mode: str) -> dict:
    context = engine._dist_contexts[mode]
    params = context.serial_main_program.all_parameters()
    return {p.name: list(context.get_tensor_dist_attr_for_program(p).dims_mapping) for p in params}


if __name__ == "__main__":
    paddle.set_device("cpu")
    settings, steps, clip, out = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    if "PADDLE_TRAINER_ID" in os.environ:
        dist.init_parallel_env()
    with rbt.legacy_static_ops() if settings is None else contextlib.nullcontext():  # the tuner enters it by itself
        result = run(settings, steps, clip)
    Path(f"{out}.{dist.get_rank()}").write_text(json.dumps(result))
