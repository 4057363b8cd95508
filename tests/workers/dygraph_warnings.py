"""What is said where a plan's ZeRO stage meets optimizers that it is not applied to, or cannot be.

python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo dygraph_warnings.py OUT
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.static import InputSpec

import paddle_rbt_plugin as rbt


def error(of: Callable[[], Any]) -> str:
    try:
        of()
    except rbt.TunerError as found:
        return str(found)
    return ""


def step(model: Any, optimizer: Any, batch: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(*batch).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
    return [str(w.message) for w in caught if issubclass(w.category, rbt.TunerWarning)]


def main(out: str) -> None:
    paddle.set_device("cpu")
    dist.init_parallel_env()
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    other = nn.Linear(4, 4)
    space = {"dp": 2, "mp": 1, "pp": 1, "sharding_stage": 2, "recompute": "none"}
    plan = rbt.tune(model, input_spec=[InputSpec([8, 16], "float32", "x")], loss=lambda x: x.mean(), search_space=space)
    plan.shard_layer(model)
    (batch,) = plan.shard_dataloader([[paddle.ones([8, 16])]])
    parameters = model.parameters()
    late = paddle.optimizer.Adam(parameters=parameters)
    found = {
        "not sharded": step(model, late, batch),
        "sharded": step(model, plan.shard_optimizer(paddle.optimizer.Adam(parameters=parameters)), batch),
        "Lamb": error(lambda: plan.shard_optimizer(paddle.optimizer.Lamb(parameters=parameters))),
        "other parameters": error(lambda: plan.shard_optimizer(paddle.optimizer.SGD(parameters=other.parameters()))),
        "wrapped": error(lambda: plan.shard_optimizer(dist.shard_optimizer(paddle.optimizer.AdamW(parameters=parameters)))),
        "after steps": step(model, plan.shard_optimizer(late), batch),
        "moments after steps": [m._local_value().shape for m in late._accumulators["moment1"].values()],
    }
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
