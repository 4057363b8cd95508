"""Saves and loads checkpoints of several kinds of training in one job, and writes the losses of what goes on from them.

    [python -m paddle.distributed.launch --nproc_per_node N --backend gloo] checkpoints.py FOLDER SAVED LOADED OUT

``SAVED`` and ``LOADED`` are JSON. Each name in ``SAVED`` trains two steps from the start and saves FOLDER/NAME; ``LOADED`` is a
list of pairs: the name of a checkpoint in FOLDER, and what loads it and trains two more. A kind of training is a list:
``serial``, ``engine``, ``to_static`` or ``dygraph``, and a search space.
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
from engine_life import CLASSES, WIDTH, Losses, Network, Samples
from paddle import nn
from paddle.distributed.fleet import auto

import paddle_rbt_plugin as rbt

BATCH, STEPS = 8, 2


class Part(paddle.io.Dataset):
    """Some batches of the samples."""

    def __init__(self, begin: int, steps: int):
        self.begin, self.steps, self.samples = begin * BATCH, steps, Samples(4 * STEPS * BATCH)

    def __len__(self) -> int:
        return self.steps * BATCH

    def __getitem__(self, i: int) -> Any:
        return self.samples[self.begin + i]

    def batches(self) -> list[list[np.ndarray]]:
        rows = [self[i] for i in range(len(self))]
        return [[np.stack(c) for c in zip(*rows[b : b + BATCH], strict=True)] for b in range(0, len(rows), BATCH)]


class Training:
    """One kind of training, from its start."""

    def __init__(self, kind: str, space: dict):
        paddle.disable_static()
        paddle.seed(11)
        self.kind, self.net = kind, Network()
        self.plan: Any = None
        specs = [paddle.static.InputSpec([BATCH, WIDTH], "float32", "x")], [paddle.static.InputSpec([BATCH, 1], "int64", "y")]
        space = {"recompute": "none", "pp": 1, **space}
        tuning = {"enable": True, "pass_name": "rule_based_tuner", "search_space": space}
        if kind == "dygraph":
            self.plan = rbt.tune(
                self.net, input_spec=specs[0], loss=nn.CrossEntropyLoss(), labels_spec=specs[1], search_space=space
            )
            self.plan.shard_layer(self.net)
        rate = paddle.optimizer.lr.StepDecay(0.02, step_size=1, gamma=0.8)
        clip = nn.ClipGradByGlobalNorm(0.5)
        self.optimizer = paddle.optimizer.AdamW(rate, parameters=self.net.parameters(), grad_clip=clip)
        self.model, self.loss = self.net, nn.CrossEntropyLoss()
        if kind == "engine":
            self.model = auto.Engine(self.net, self.loss, self.optimizer, strategy=auto.Strategy({"tuning": tuning}))
        elif kind == "to_static":
            self.model = dist.to_static(self.net, None, self.loss, self.optimizer, dist.Strategy({"tuning": tuning}), specs)
            self.model.train()

    def train(self, begin: int) -> list[float]:
        part = Part(begin, STEPS)
        if self.kind == "engine":
            seen = Losses()
            self.model.fit(part, batch_size=BATCH, verbose=0, callbacks=[seen])
            return seen.losses
        losses = []
        batches = part.batches()
        if self.plan is not None:
            batches = self.plan.shard_dataloader(batches)
        elif self.kind == "to_static":
            batches = rbt.engine_plan(self.model).shard_dataloader(batches)
        for batch in batches:
            if self.kind == "to_static":
                losses.append(float(self.model(*batch)))
            else:
                x, y = (v if isinstance(v, paddle.Tensor) else paddle.to_tensor(v) for v in batch)
                loss = self.loss(self.net(x), y)
                loss.backward()
                self.optimizer.step()
                self.optimizer.clear_grad()
                losses.append(float(loss))
            self.optimizer._learning_rate.step()
        return losses

    def with_optimizer(self) -> tuple[Any, ...]:
        return (self.model, self.optimizer) if self.kind in ("serial", "dygraph") else (self.model,)


def alone(kind: list, act: Any) -> Any:
    with paddle.utils.unique_name.guard(), paddle.static.scope_guard(paddle.static.Scope()):
        found = act(Training(*kind))
    paddle.disable_static()
    return found


def save(folder: Path, name: str, kind: list) -> Any:
    def act(training: Training) -> Any:
        losses = training.train(0)
        rbt.save_checkpoint(folder / name, *training.with_optimizer(), extra={"steps": STEPS})
        return {"losses": losses, "drawn": drawn()}

    return alone(kind, act)


def load(folder: Path, name: str, kind: list) -> Any:
    def act(training: Training) -> Any:
        extra = rbt.load_checkpoint(folder / name, *training.with_optimizer())
        numbers = drawn()
        return {"losses": training.train(extra["steps"]), "drawn": numbers}

    return alone(kind, act)


def drawn() -> list[float]:
    with paddle.base.dygraph.guard():
        return [*paddle.rand([2]).numpy().tolist(), float(np.random.rand())]


if __name__ == "__main__":
    paddle.set_device("cpu")
    folder, saved, loaded, out = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
    if "PADDLE_TRAINER_ID" in os.environ:
        dist.init_parallel_env()
    assert CLASSES == 4
    result = {
        "saved": {name: save(folder, name, kind) for name, kind in saved.items()},
        "loaded": {f"{name} into {kind}": load(folder, name, kind) for name, kind in loaded},
    }
    if dist.get_rank() == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(result, file)
