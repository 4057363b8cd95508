"""Ways to use an engine, each compared with the serial model; writes, by rank and name, what differs or what went wrong.

[python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo] engine_uses.py OUT
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from engine_life import WIDTH, Network, Samples
from paddle import nn
from paddle.distributed.fleet import auto

import paddle_rbt_plugin as rbt

SETTINGS: dict[str, Any] = {"batch_size": 8, "verbose": 0}


def tuning(**more: Any) -> dict[str, Any]:
    space = {"dp": dist.get_world_size(), "recompute": "none", "pp": 1, "sharding_stage": 0}
    return {"tuning": {"enable": True, "pass_name": "rule_based_tuner", "search_space": space, **more}}


def engine(net: nn.Layer, rate: float | None = 0.1, loss: Any = None, **more: Any) -> Any:
    optimizer = None if rate is None else paddle.optimizer.SGD(rate, parameters=net.parameters())
    return auto.Engine(net, loss, optimizer, strategy=auto.Strategy(tuning(**more)))


def columns(count: int) -> list[np.ndarray]:
    return [np.stack(c) for c in zip(*(Samples(count)[i] for i in range(count)), strict=True)]


def joined(predicted: list[list[np.ndarray]], output: int = 0) -> np.ndarray:
    return np.concatenate([batch[output] for batch in predicted])


def difference(found: Any, expected: Any) -> float:
    return float(np.abs(np.asarray(found) - np.asarray(expected)).max())


def loss_of(net: nn.Layer, count: int) -> float:
    x, label = map(paddle.to_tensor, columns(count))
    return float(nn.CrossEntropyLoss()(net(x), label))


class Masked(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.head = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.drop(self.inner(x)))


def dropout_is_off_in_evaluation() -> list[float]:
    net = Masked()
    net.eval()
    expected = loss_of(net, 29)
    net.train()
    made = engine(net, 0.0, nn.CrossEntropyLoss())
    found = [made.evaluate(Samples(29), **SETTINGS)["loss"]]
    made.fit(Samples(32), **SETTINGS)
    assert net.drop.training
    return [difference(loss, expected) for loss in (*found, made.evaluate(Samples(29), **SETTINGS)["loss"])]


def an_engine_without_optimizer() -> list[float]:
    net = Network()
    loss, outputs = loss_of(net, 29), net(paddle.to_tensor(columns(29)[0])).numpy()
    made = engine(net, None, nn.CrossEntropyLoss())
    found = made.evaluate(Samples(29), **SETTINGS)["loss"]
    return [difference(found, loss), difference(joined(made.predict(Samples(29), **SETTINGS)), outputs)]


def an_engine_without_loss() -> list[float]:
    net = Network()
    outputs = net(paddle.to_tensor(columns(29)[0])).numpy()
    return [difference(joined(engine(net, None).predict(Samples(29), **SETTINGS)), outputs)]


def a_plan_that_is_loaded() -> list[float]:
    path = f"{sys.argv[1]}.plan"
    with paddle.utils.unique_name.guard(), paddle.static.scope_guard(paddle.static.Scope()):
        engine(Network(), 0.1, nn.CrossEntropyLoss(), save_path=path).fit(Samples(32), **SETTINGS)
    paddle.disable_static()
    net = Network()
    outputs = net(paddle.to_tensor(columns(29)[0])).numpy()
    made = engine(net, 0.1, nn.CrossEntropyLoss(), load_path=path)
    predicted = joined(made.predict(Samples(29), **SETTINGS))
    made.fit(Samples(32), **SETTINGS)
    return [difference(predicted, outputs)]


class Two(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x, z):
        return self.first(x) + self.second(z), self.first(x).sum(-1), self.second.weight.sum()


class Pairs(paddle.io.Dataset):
    def __init__(self, labels: bool):
        self.labels = labels

    def __len__(self) -> int:
        return 21

    def __getitem__(self, i: int) -> Any:
        x, z = np.random.default_rng(i).standard_normal((2, WIDTH)).astype("float32")
        return ((x, z), np.array([i % 4])) if self.labels else (x, z)


def several_inputs_and_outputs() -> list[float]:
    net, loss = Two(), nn.CrossEntropyLoss()
    pairs = [np.stack([Pairs(False)[i][k] for i in range(21)]) for k in (0, 1)]
    expected = [v.numpy() for v in net(*map(paddle.to_tensor, pairs))]
    made = engine(net, 0.0, lambda out, total, weight, label: loss(out, label))
    made.fit(Pairs(True), **SETTINGS)
    found = [made.predict(Pairs(labels), **SETTINGS) for labels in (False, True)]
    rows = [difference(joined(predicted, k), expected[k]) for predicted in found for k in (0, 1)]
    return rows + [difference(batch[2], expected[2]) for predicted in found for batch in predicted]


class Stream(paddle.io.IterableDataset):
    def __iter__(self) -> Any:
        return (Samples(29)[i] for i in range(29))


def an_iterable_dataset() -> list[float]:
    net = Network()
    loss, outputs = loss_of(net, 29), net(paddle.to_tensor(columns(29)[0])).numpy()
    made = engine(net, 0.0, nn.CrossEntropyLoss())
    history = made.fit(Stream(), epochs=2, steps_per_epoch=2, valid_data=Stream(), **SETTINGS)
    assert history.history["step"] == [2, 2]
    predicted = made.predict(Stream(), **SETTINGS)
    assert len(predicted) == 4 and len(made.predict(Stream(), steps=1, **SETTINGS)) == 1
    return [*(difference(found, loss) for found in history.history["val_loss"]), difference(joined(predicted), outputs)]


def a_dataloader() -> list[float]:
    made = engine(Network(), 0.1, nn.CrossEntropyLoss())
    loader = made.dataloader(Samples(29), batch_size=8, shuffle=True, num_workers=2, mode="train", sample_split=1)
    losses = [[float(made.run(batch)["loss"]) for batch in loader] for _ in range(3)]
    assert len(loader) == 3 and [len(epoch) for epoch in losses] == [3, 3, 3]
    assert np.mean(losses[2]) < np.mean(losses[0])
    return [0.0]


def to_static_back_and_forth() -> list[float]:
    net, reference = Network(), Network()
    reference.set_state_dict(net.state_dict())
    specs = [[paddle.static.InputSpec([8, WIDTH], "float32", "x")], [paddle.static.InputSpec([8, 1], "int64", "y")]]
    optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    model = dist.to_static(net, None, nn.CrossEntropyLoss(), optimizer, dist.Strategy(tuning()), specs)
    serial = paddle.optimizer.SGD(0.1, parameters=reference.parameters())
    x, label = columns(8)
    rows = 8 // dist.get_world_size()
    mine = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
    found = []
    for mode in ("eval", "train", "predict", "train", "eval", "predict", "train"):
        getattr(model, mode)()
        outputs = reference(paddle.to_tensor(x))
        loss = nn.CrossEntropyLoss()(outputs, paddle.to_tensor(label))
        if mode == "predict":
            found.append(difference(model(paddle.to_tensor(x[mine]))["out0"], outputs.numpy()))
            continue
        found.append(difference(float(model(paddle.to_tensor(x[mine]), paddle.to_tensor(label[mine]))), float(loss)))
        if mode == "train":
            loss.backward()
            serial.step()
            serial.clear_grad()
            model.set_state_dict(model.state_dict())
    assert rbt.engine_plan(model) is not None
    return found


USES = (
    dropout_is_off_in_evaluation, an_engine_without_optimizer, an_engine_without_loss, a_plan_that_is_loaded,
    several_inputs_and_outputs, an_iterable_dataset, a_dataloader, to_static_back_and_forth,
)  # fmt: skip


def used(act: Any) -> dict[str, Any]:
    paddle.disable_static()
    paddle.seed(3)
    try:
        with paddle.utils.unique_name.guard(), paddle.static.scope_guard(paddle.static.Scope()):
            return {"differences": act()}
    except Exception:
        return {"error": traceback.format_exc()[-2000:]}


if __name__ == "__main__":
    paddle.set_device("cpu")
    if dist.get_world_size() > 1:
        dist.init_parallel_env()
    found = {act.__name__: used(act) for act in USES}
    everything: list[Any] = [found]
    if dist.get_world_size() > 1:
        paddle.disable_static()
        dist.all_gather_object(everything := [], found)
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(everything, file)
