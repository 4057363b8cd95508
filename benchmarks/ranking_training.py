"""What each process of ``benchmarks/ranking.py`` does: trains a model under a plan and tells every step's loss and seconds."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_rbt_plugin.config import PASS_NAME
from paddle_rbt_plugin.models import GPTConfig, LlamaConfig, build, input_spec, sample_batch
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.processes import work

LEARNING_RATE = 1e-3
SEED = 2024


def steps(directory: str, way: str, count: str) -> Iterator[dict[str, float]]:
    """Trains the model of ``model.json`` under ``plan.json``, which was made for ``cluster.yaml``, all in the directory."""
    path = Path(directory)
    described = json.loads((path / "model.json").read_text())
    config = (GPTConfig if described["arch"] == "gpt" else LlamaConfig)(**described["config"])
    batch, plan = described["batch"], Plan.load(path / "plan.json")
    paddle.seed(SEED)
    model = build(config)
    data = [[paddle.to_tensor(v) for v in sample_batch(config, batch, SEED + i).values()] for i in range(int(count))]
    step = _static(model, path, input_spec(config, batch)) if way == "static" else _dygraph(model, plan)
    for arguments in plan.shard_dataloader(data):
        dist.barrier()
        started = time.perf_counter()
        loss = step(*arguments)
        seconds = time.perf_counter() - started
        yield {"loss": _mean(loss), "seconds": seconds}


def _static(model: Any, path: Path, spec: list[Any]) -> Callable[..., float]:
    strategy = dist.Strategy()
    strategy.tuning.enable = True
    strategy.tuning.pass_name = PASS_NAME
    strategy.tuning.cluster = str(path / "cluster.yaml")
    strategy.tuning.load_path = str(path / "plan.json")
    trained = dist.to_static(model, None, lambda loss: loss, _optimizer(model), strategy, input_spec=[spec, []])
    trained.train()
    return lambda *arguments: float(trained(*arguments))


def _dygraph(model: Any, plan: Plan) -> Callable[..., float]:
    plan.shard_layer(model)
    optimizer = _optimizer(model)

    def step(*arguments: paddle.Tensor) -> float:
        loss = model(*arguments)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return dist.unshard_dtensor(loss).item()

    return step


def _mean(loss: float) -> float:
    """Over all processes, since what a program fetches may be the loss of its own samples."""
    value = paddle.to_tensor([loss])
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def _optimizer(model: Any) -> paddle.optimizer.Optimizer:
    return paddle.optimizer.AdamW(LEARNING_RATE, parameters=model.parameters())


if __name__ == "__main__":
    work(sys.argv[1], steps(*sys.argv[1:]))
