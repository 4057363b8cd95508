"""Trains a network that drops values, of two processes, through ``auto.Engine`` on legacy programs; every rank writes JSON.

python random_worker.py OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet import auto

import paddle_rbt_plugin as rbt

BATCH, STEPS = 8, 3


class Same(paddle.io.Dataset):
    """Samples that are all alike."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, i: int) -> Any:
        return np.linspace(-1, 1, 16, dtype="float32"), np.zeros(16, "float32")


class Net(nn.Layer):
    """Drops values of a sharded and of a replicated tensor under mp, and of a part of the batch under dp."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return self.outer(self.norm(x + self.down(self.inner(nn.functional.relu(self.up(x))))))


class Halves(nn.Layer):
    """Output 0 where both halves of the hidden values are dropped alike."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 16)
        signs = np.repeat([1, -1], 32).astype("float32")
        self.up.weight.set_value(np.zeros([16, 64], "float32"))
        self.up.bias.set_value(np.ones(64, "float32"))
        self.down.weight.set_value(np.tile(signs[:, None], [1, 16]))

    def forward(self, x: Any) -> Any:
        return self.down(self.drop(nn.functional.relu(self.up(x))))


class Noisy(nn.Layer):
    """Adds noise that is drawn with the shape of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)

    def forward(self, x: Any) -> Any:
        return self.norm(x + self.down(nn.functional.relu(self.up(x + paddle.rand([BATCH, 16])))))


class Losses(paddle.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.losses.append(float(np.mean(logs["loss"])))


def built_statically(space: dict[str, int]) -> dict[str, Any]:
    """What this rank holds of a model that is built in static mode: its startup program draws the weights."""
    paddle.enable_static()
    paddle.seed(7)
    strategy = auto.Strategy()
    strategy.tuning.enable, strategy.tuning.pass_name, strategy.tuning.search_space = True, "rule_based_tuner", space
    network = Net()
    optimizer = paddle.optimizer.SGD(0.1, parameters=network.parameters())
    engine = auto.Engine(network, nn.MSELoss(), optimizer, strategy=strategy)
    engine.fit(Same(), batch_size=BATCH, epochs=1, verbose=0)
    rbt.check_replicas(engine)
    scope, program = paddle.static.global_scope(), engine.main_program
    weights = [np.array(scope.find_var(p.name).get_tensor()) for p in program.all_parameters()]
    return {"weights": [w.tolist() for w in weights]}


def run(make: type[nn.Layer], seed: int, space: dict[str, int], rate: float = 0.1) -> dict[str, Any]:
    paddle.disable_static()
    paddle.seed(seed)
    network = make()
    strategy = auto.Strategy()
    strategy.tuning.enable, strategy.tuning.pass_name, strategy.tuning.search_space = True, "rule_based_tuner", space
    optimizer = paddle.optimizer.SGD(rate, parameters=network.parameters())
    engine = auto.Engine(network, nn.MSELoss(), optimizer, strategy=strategy)
    recorded = Losses()
    engine.fit(Same(), batch_size=BATCH, epochs=1, verbose=0, callbacks=[recorded])
    rbt.check_replicas(engine)
    return {"losses": recorded.losses}


if __name__ == "__main__":
    paddle.set_device("cpu")
    dist.init_parallel_env()
    rank = dist.get_rank()
    mp, dp = {"mp": 2, "dp": 1, "pp": 1}, {"mp": 1, "dp": 2, "pp": 1}
    found = {
        "static": built_statically(mp),  # first, since a startup program draws no weights that are there
        "halves": run(Halves, 3, mp, rate=0.0),
        "mp": run(Net, 5, mp),
        "mp again": run(Net, 5, mp),
        "mp other": run(Net, 6, mp),
        "dp": run(Net, 5, dp),
        "mp seeded apart": run(Net, 100 + rank, mp),
        "mp noise": run(Noisy, 5, mp),
        "dp noise": run(Noisy, 5, dp),
        "dp noise again": run(Noisy, 5, dp),
        "dp seeded apart": run(Net, 100 + rank, dp),
    }
    Path(f"{sys.argv[1]}.{rank}").write_text(json.dumps(found), encoding="utf-8")
