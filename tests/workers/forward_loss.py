"""Trains and evaluates models whose forward returns the loss, under replicas; every rank writes what it saw.

    python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo forward_loss.py OUT

In one process, without the tuner: the losses and weights that are right.
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
from paddle.distributed.fleet import auto
from paddle.static import InputSpec
from steps import over_ranks

import paddle_rbt_plugin as rbt

BATCH, STEPS = 8, 4
SPACE = {"dp": 2, "mp": 1, "pp": 1, "sharding_stage": 0, "recompute": "none"}
TUNING = {"enable": True, "pass_name": "rule_based_tuner", "search_space": SPACE}


class Samples(paddle.io.Dataset):
    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        return np.random.default_rng(i).standard_normal(16).astype("float32"), np.array([i % 4])


class Features(Samples):
    def __getitem__(self, i: int) -> tuple[Any, ...]:
        return super().__getitem__(i)[:1]


class Classifier(nn.Layer):
    """Returns its loss, and behind it the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x, labels):
        logits = self.down(nn.functional.gelu(self.up(x)))
        return nn.functional.cross_entropy(logits, labels), logits


class Autoencoder(nn.Layer):
    """Reads no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return ((self.down(nn.functional.gelu(self.up(x))) - x) ** 2).mean()


def first_output(*outputs: Any) -> Any:
    return outputs[0]


def batches(data: paddle.io.Dataset) -> list[list[Any]]:
    rows = [[data[i] for i in range(k * BATCH, (k + 1) * BATCH)] for k in range(STEPS)]
    return [[np.stack(column) for column in zip(*row, strict=True)] for row in rows]


def serial(network: nn.Layer, optimizer: Any, data: paddle.io.Dataset) -> dict:
    losses = []
    for batch in batches(data):
        loss = network(*map(paddle.to_tensor, batch))
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    with paddle.no_grad():
        outputs = [network(*map(paddle.to_tensor, batch)) for batch in batches(data)]
    return {"trained": losses, "evaluated": [float(o[0] if isinstance(o, tuple) else o) for o in outputs]}


def through_engine(network: nn.Layer, optimizer: Any, data: paddle.io.Dataset, loss: Any, split: int | None = None) -> dict:
    engine = auto.Engine(network, loss, optimizer, strategy=auto.Strategy({"tuning": TUNING}))
    engine.fit(data, split, batch_size=BATCH, verbose=0)
    evaluated = engine.evaluate(data, split, batch_size=BATCH, verbose=0)["loss"]
    paddle.disable_static()
    return {"last": over_ranks(float(engine.history.history["loss"][-1])), "evaluated": over_ranks(float(evaluated))}


def through_prepare(network: nn.Layer, optimizer: Any, data: paddle.io.Dataset) -> dict:
    """The labels are given as such, though forward reads them."""
    engine = auto.Engine(network, loss=None, optimizer=optimizer, strategy=auto.Strategy({"tuning": TUNING}))
    engine.prepare([InputSpec([BATCH, 16], "float32", "x")], [InputSpec([BATCH, 1], "int64", "labels")], mode="train")
    rows = slice(dist.get_rank() * BATCH // 2, (dist.get_rank() + 1) * BATCH // 2)
    feeds = [{"x": x[rows], "labels": y[rows]} for x, y in batches(data)]
    losses = [float(engine.run(feed)["loss"]) for feed in feeds]
    paddle.disable_static()
    return {"trained": list(map(over_ranks, losses))}


def through_to_static(network: nn.Layer, optimizer: Any, data: paddle.io.Dataset) -> dict:
    loader = paddle.io.DataLoader(data, batch_size=BATCH)
    model = dist.to_static(network, loader, None, optimizer, dist.Strategy({"tuning": TUNING}))
    model.train()
    sharded = rbt.engine_plan(model).shard_dataloader(batches(data))
    trained = [over_ranks(model(*batch)) for batch in sharded]
    model.eval()
    return {"trained": trained, "evaluated": [over_ranks(model(*batch)) for batch in sharded]}


def width(network: nn.Layer) -> int:
    """How many parts of a sample forward reads."""
    return 2 if isinstance(network, Classifier) else 1


WAYS = {
    "Engine(loss=None)": lambda *a: through_engine(*a, None),
    "Engine(loss=None), split": lambda *a: through_engine(*a, None, width(a[0])),
    "Engine of a loss that passes through": lambda *a: through_engine(*a, first_output, width(a[0])),
    "prepare": through_prepare,
    "to_static": through_to_static,
}


def run(network_of: Any, data: paddle.io.Dataset, way: Any) -> dict:
    paddle.disable_static()
    paddle.seed(2024)
    with paddle.static.scope_guard(paddle.static.Scope()), paddle.utils.unique_name.guard():
        network = network_of()
        optimizer = paddle.optimizer.AdamW(1e-2, parameters=network.parameters())
        return way(network, optimizer, data)


if __name__ == "__main__":
    paddle.set_device("cpu")
    parallel = "PADDLE_TRAINER_ID" in os.environ and dist.get_world_size() > 1
    if parallel:
        dist.init_parallel_env()
    ways = WAYS if parallel else {"serial": serial}
    found = {}
    for network_of, data in ((Classifier, Samples()), (Autoencoder, Features())):
        for name, way in ways.items():
            if not (name == "prepare" and network_of is Autoencoder):
                found[f"{network_of.__name__}, {name}"] = run(network_of, data, way)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
