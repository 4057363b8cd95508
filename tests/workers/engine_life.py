"""Lives of engines in one job, each compared with a serial model in dygraph that does the same; writes the largest differences.

    [python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo] engine_life.py LIVES OUT

``LIVES`` is JSON: by name, a search space, settings (``micro_batches``, ``optimizer``, ``clip``), and acts, each a list of a
verb and its arguments: ``fit`` SAMPLES BATCH EPOCHS, ``evaluate`` SAMPLES BATCH, ``predict`` SAMPLES BATCH. Written is by name
what each rank saw: the largest difference of a loss or an output, and that of a weight over its movement.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet import auto

import paddle_rbt_plugin  # noqa: F401  registers the tuner

WIDTH, CLASSES = 16, 4


class Samples(paddle.io.Dataset):
    def __init__(self, count: int, labels: bool = True, seed: int = 0):
        self.count, self.labels, self.seed = count, labels, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        rng = np.random.default_rng([self.seed, i])
        x, label = rng.standard_normal(WIDTH).astype("float32"), rng.integers(CLASSES, size=1)
        return (x, label) if self.labels else (x,)


class Network(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        return self.head(x + self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Losses(paddle.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.losses.append(float(logs["loss"]))


def made(life: dict) -> tuple[nn.Layer, paddle.optimizer.Optimizer]:
    paddle.disable_static()
    paddle.seed(5)
    net = Network()
    rate = paddle.optimizer.lr.StepDecay(life.get("rate", 0.01), step_size=1, gamma=0.9)
    clip = nn.ClipGradByGlobalNorm(0.1) if life.get("clip") else None
    return net, getattr(paddle.optimizer, life.get("optimizer", "AdamW"))(rate, parameters=net.parameters(), grad_clip=clip)


class Serial:
    """The serial model; what it does returns what an engine's act returns."""

    def __init__(self, life: dict):
        self.net, self.optimizer = made(life)
        self.before = {p.name: p.numpy() for p in self.net.parameters()}
        self.loss = nn.CrossEntropyLoss()

    def _batches(self, samples: int, size: int, whole: bool) -> Any:
        data = Samples(samples)
        for begin in range(0, samples, size):
            rows = [data[i] for i in range(begin, min(begin + size, samples))]
            if whole or len(rows) == size:
                yield [paddle.to_tensor(np.stack(column)) for column in zip(*rows, strict=True)]

    def fit(self, samples: int, size: int, epochs: int = 1) -> list[float]:
        losses = []
        self.net.train()
        for _ in range(epochs):
            for x, label in self._batches(samples, size, whole=False):
                loss = self.loss(self.net(x), label)
                loss.backward()
                self.optimizer.step()
                self.optimizer.clear_grad()
                self.optimizer._learning_rate.step()
                losses.append(float(loss))
        return losses

    @paddle.no_grad()
    def evaluate(self, samples: int, size: int) -> list[float]:
        self.net.eval()
        (batch,) = self._batches(samples, samples, whole=True)
        logits = self.net(batch[0])
        accuracy = float((logits.argmax(-1, keepdim=True) == batch[1]).astype("float32").mean())
        return [float(self.loss(logits, batch[1])), accuracy]

    @paddle.no_grad()
    def predict(self, samples: int, size: int) -> list[float]:
        self.net.eval()
        outputs = [self.net(x).numpy() for x, _ in self._batches(samples, size, whole=True)]
        return np.concatenate([o.reshape(-1) for o in outputs]).tolist()


class Engine:
    """An engine under the tuner; every act is followed by a look at what it returns."""

    def __init__(self, life: dict):
        net, optimizer = made(life)
        steps = life.get("micro_batches", 1)
        tuning = {
            "enable": True,
            "pass_name": "rule_based_tuner",
            "search_space": {"recompute": "none", "pp": 1, **life["space"]},
        }
        strategy = auto.Strategy({"tuning": tuning, "gradient_merge": {"enable": steps > 1, "k_steps": steps, "avg": True}})
        self.engine = auto.Engine(net, nn.CrossEntropyLoss(), optimizer, metrics=paddle.metric.Accuracy(), strategy=strategy)

    def fit(self, samples: int, size: int, epochs: int = 1) -> list[float]:
        seen = Losses()
        self.engine.fit(Samples(samples), batch_size=size, epochs=epochs, verbose=0, callbacks=[seen])
        return seen.losses

    def evaluate(self, samples: int, size: int) -> list[float]:
        logs = self.engine.evaluate(Samples(samples), batch_size=size, verbose=0)
        return [float(logs["loss"]), float(logs["acc"])]

    def predict(self, samples: int, size: int) -> list[float]:
        found = self.engine.predict(Samples(samples, labels=False), batch_size=size, verbose=0)
        sizes = [min(size, samples - begin) for begin in range(0, samples, size)]
        assert [batch[0].shape for batch in found] == [(n, CLASSES) for n in sizes]
        return np.concatenate([batch[0].reshape(-1) for batch in found]).tolist()


def part(whole: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """What this rank has of a weight of which it has that shape."""
    rank = dist.get_rank()
    rows = (slice(rank * n, (rank + 1) * n) if n < size else slice(size) for n, size in zip(shape, whole.shape, strict=True))
    return whole[tuple(rows)]


def lived(life: dict) -> dict:
    with paddle.utils.unique_name.guard():
        serial = Serial(life)
        expected = [getattr(serial, verb)(*arguments) for verb, *arguments in life["acts"]]
        after = {p.name: p.numpy() for p in serial.net.parameters()}
    with paddle.utils.unique_name.guard(), paddle.static.scope_guard(paddle.static.Scope()):
        tuned = Engine(life)
        found = [getattr(tuned, verb)(*arguments) for verb, *arguments in life["acts"]]
        scope = paddle.static.global_scope()
        weights = {name: np.array(scope.find_var(name).get_tensor()) for name in after}
    moved = {n: abs(after[n] - serial.before[n]).max() or 1.0 for n in after}
    return {
        "numbers": [float(np.abs(np.subtract(a, b)).max()) for a, b in zip(found, expected, strict=True)],
        "weights": max(float(abs(weights[n] - part(after[n], weights[n].shape)).max() / moved[n]) for n in after),
    }


if __name__ == "__main__":
    paddle.set_device("cpu")
    lives, out = sys.argv[1:]
    if dist.get_world_size() > 1:
        dist.init_parallel_env()
    found = {name: lived(life) for name, life in json.loads(lives).items()}
    everything: list[Any] = [found]
    if dist.get_world_size() > 1:
        paddle.disable_static()
        dist.all_gather_object(everything := [], found)
    if dist.get_rank() == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(everything, file)
