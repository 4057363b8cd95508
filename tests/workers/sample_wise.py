"""Models with ops that treat samples one by one: each is trained for some steps alone and by two processes along ``dp``; every
rank writes the largest difference of a loss, and of a weight over how far training has moved it.

    python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo sample_wise.py OUT
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.nn import functional as F
from paddle.static import InputSpec

import paddle_rbt_plugin as rbt

BATCH, CHANNELS, SIZE, STEPS = 8, 4, 8, 3
Shape = Callable[["Network", Any], Any]


class Network(nn.Layer):
    """Whatever layers the models here use; ``shape`` says how."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.conv, self.again = nn.Conv2D(3, CHANNELS, 3, padding=1), nn.Conv2D(CHANNELS, CHANNELS, 3, padding=1)
        self.head = nn.Linear(CHANNELS, 1)

    def features(self, x: Any) -> Any:
        return F.relu(self.conv(x))

    def forward(self, x: Any) -> Any:
        return self.shape(self, x)


def pooled(n: Network, x: Any) -> Any:
    return n.head(x.mean([2, 3]))


SHAPES: dict[str, Shape] = {
    "max pool": lambda n, x: n.head(F.max_pool2d(n.features(x), SIZE).flatten(1)),
    "average pool": lambda n, x: pooled(n, F.avg_pool2d(n.features(x), 2)),
    "adaptive pool": lambda n, x: n.head(F.adaptive_avg_pool2d(n.features(x), 1).flatten(1)),
    "pool with places": lambda n, x: pooled(n, F.max_unpool2d(*F.max_pool2d(n.features(x), 2, return_mask=True), 2)),
    "bilinear": lambda n, x: pooled(n, n.again(F.interpolate(n.features(x), scale_factor=2, mode="bilinear"))),
    "nearest": lambda n, x: pooled(n, n.again(F.interpolate(n.features(x), size=[12, 12], mode="nearest"))),
    "pixel shuffle": lambda n, x: F.pixel_shuffle(n.features(x), 2).mean([1, 2, 3]).unsqueeze(-1),
    "padding": lambda n, x: pooled(n, F.pad(n.features(x), [1, 1, 1, 1], mode="reflect")),
    "unfold": lambda n, x: F.unfold(n.features(x), 2).square().mean([1, 2]).unsqueeze(-1),
    "greatest": lambda n, x: (
        pooled(n, n.features(x)) * n.features(x).argmax(axis=1).astype("float32").mean([1, 2]).unsqueeze(-1)
    ),
    "einsum": lambda n, x: paddle.einsum("bchw,cd->bd", n.features(x), n.head.weight.expand([CHANNELS, 2])).mean(-1, True),
}


def batches() -> list[list[np.ndarray]]:
    random = np.random.default_rng(5)
    return [
        [random.standard_normal((BATCH, 3, SIZE, SIZE)).astype("float32"), random.standard_normal((BATCH, 1)).astype("float32")]
        for _ in range(STEPS)
    ]


def built(shape: Shape) -> tuple[Network, Any]:
    paddle.seed(3)
    network = Network(shape)
    return network, paddle.optimizer.Momentum(0.05, parameters=network.parameters())


def alone(shape: Shape) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    network, optimizer = built(shape)
    before = {name: p.numpy() for name, p in network.named_parameters()}
    losses = []
    for x, y in batches():
        loss = F.mse_loss(network(paddle.to_tensor(x)), paddle.to_tensor(y))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses, before, {name: p.numpy() for name, p in network.named_parameters()}


def together(shape: Shape) -> tuple[list[float], dict[str, Any]]:
    network, optimizer = built(shape)
    space = {"dp": 2, "pp": 1, "sharding_stage": 0, "recompute": "none"}
    strategy = dist.Strategy({"tuning": {"enable": True, "pass_name": "rule_based_tuner", "search_space": space}})
    spec = [[InputSpec([BATCH, 3, SIZE, SIZE], "float32", "x")], [InputSpec([BATCH, 1], "float32", "y")]]
    model = dist.to_static(network, None, nn.MSELoss(), optimizer, strategy, input_spec=spec)
    model.train()
    losses = [float(model(*batch)) for batch in rbt.engine_plan(model).shard_dataloader(batches())]
    return losses, {
        name: np.array(value._local_value() if value.is_dist() else value) for name, value in model.state_dict("param").items()
    }


def differences(shape: Shape) -> dict[str, float]:
    losses, before, after = alone(shape)
    shown, weights = together(shape)
    moved = {name: max(float(abs(after[name] - before[name]).max()), 1e-2) for name in after}
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(shown, losses, strict=True)),
        "weight": max(float(abs(weights[name] - after[name]).max()) / moved[name] for name in weights),
    }


def main(out: str) -> None:
    paddle.set_device("cpu")
    dist.init_parallel_env()
    found: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        paddle.disable_static()
        with paddle.utils.unique_name.guard(), paddle.static.scope_guard(paddle.static.Scope()):
            try:
                found[name] = differences(shape)
            except Exception:
                found[name] = traceback.format_exc()[-2000:]
    with open(f"{out}.{dist.get_rank()}", "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
