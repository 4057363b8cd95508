"""Trains a residual network with pooling and batch norms on two replicas, and writes losses and running statistics.

    python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo batch_norm.py ENTRY OUT

``ENTRY`` is serial, to_static or dygraph.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.static import InputSpec
from steps import over_ranks, train_as

import paddle_rbt_plugin as rbt

BATCH, CHANNELS, STEPS = 8, 4, 3
SPACE = {"dp": 2, "mp": 1}


def conv() -> nn.Layer:
    """Without a bias, whose gradient would be rounding errors alone, since a batch norm follows."""
    return nn.Conv2D(CHANNELS, CHANNELS, 3, padding=1, bias_attr=False)


class Block(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(), nn.BatchNorm2D(CHANNELS)
        self.conv2, self.norm2 = conv(), nn.BatchNorm2D(CHANNELS)

    def forward(self, x: Any) -> Any:
        hidden = nn.functional.relu(self.norm1(self.conv1(x)))
        return nn.functional.relu(x + self.norm2(self.conv2(hidden)))


class Network(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2D(3, CHANNELS, 3), nn.Sequential(Block(), Block())
        self.pool, self.head = nn.MaxPool2D(2), nn.Linear(CHANNELS, 10)

    def forward(self, images: Any) -> Any:
        features = self.blocks(self.pool(self.stem(images)))
        return self.head(nn.functional.adaptive_avg_pool2d(features, 1).flatten(1))


def batch(step: int) -> list[np.ndarray]:
    random = np.random.default_rng(step)
    return [random.standard_normal([BATCH, 3, 8, 8]).astype("float32"), random.integers(0, 10, [BATCH, 1])]


def statistics(network: nn.Layer) -> dict[str, list[float]]:
    states = {name.removeprefix("network."): v for name, v in network.state_dict().items() if "._" in name}
    return {name: (dist.unshard_dtensor(v) if v.is_dist() else v).numpy().tolist() for name, v in sorted(states.items())}


def evaluated(entry: str, model: Any) -> float:
    """The loss of one more batch with the running statistics."""
    last = batch(STEPS)
    model.eval()
    if entry == "to_static":
        (parts,) = rbt.engine_plan(model).shard_dataloader([last])
        return over_ranks(model(*parts))
    images, labels = map(paddle.to_tensor, last)
    return over_ranks(nn.functional.cross_entropy(model(images), labels))


def main(entry: str, out: str) -> None:
    paddle.set_device("cpu")
    if "PADDLE_TRAINER_ID" in os.environ:
        dist.init_parallel_env()
    paddle.seed(2024)
    network = Network()
    batches = [batch(step) for step in range(STEPS)]
    spec = [InputSpec([BATCH, 3, 8, 8], "float32", "images"), InputSpec([BATCH, 1], "int64", "labels")]
    model, losses = train_as(entry, network, nn.CrossEntropyLoss(), spec, SPACE, batches)
    found = {"losses": losses, "statistics": statistics(model)}
    if entry != "dygraph":
        found["evaluation"] = evaluated(entry, model)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
