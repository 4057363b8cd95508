"""Checkpoints saved under one plan are loaded under another and into the serial model; what is not whole is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from launching import launch
from paddle import nn
from paddle.distributed.fleet import auto

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.checkpoint import store

SERIAL: tuple[Any, ...] = ("serial", {})
KINDS: dict[str, tuple[Any, ...]] = {
    "serial": SERIAL,
    "dp2": ("engine", {"dp": 2, "sharding_stage": 0}),
    "mp2": ("engine", {"mp": 2}),
    "ZeRO 2": ("engine", {"dp": 2, "sharding_stage": 2}),
    "to_static": ("to_static", {"dp": 2, "sharding_stage": 0}),
    "dygraph mp2": ("dygraph", {"mp": 2}),
}
PAIRS = [
    ("serial", "dp2"), ("dp2", "mp2"), ("mp2", "ZeRO 2"), ("ZeRO 2", "to_static"), ("to_static", "dygraph mp2"),
    ("dygraph mp2", "serial"), ("ZeRO 2", "serial"), ("serial", "dygraph mp2"), ("dygraph mp2", "mp2"),
]  # fmt: skip
DP_MP = ("dygraph", {"dp": 2, "mp": 2, "sharding_stage": 0})


@pytest.mark.slow
def test_training_goes_on_under_another_plan_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    def launched(name: str, processes: int, saved: dict, loaded: list) -> dict:
        out = tmp_path / name / "result.json"
        out.parent.mkdir()
        arguments = (str(tmp_path / "checkpoints"), json.dumps(saved), json.dumps(loaded))
        return launch("checkpoints.py", processes, out, *arguments, timeout=900)

    uninterrupted = launched("serial", 1, {"alone": SERIAL}, [("alone", SERIAL)])
    first = uninterrupted["saved"]["alone"]["losses"]
    then = uninterrupted["loaded"][f"alone into {list(SERIAL)}"]["losses"]
    assert first + then == pytest.approx(serial_losses(), abs=1e-5)
    results = [
        launched("two", 2, KINDS, [(name, KINDS[kind]) for name, kind in PAIRS]),
        launched("four", 4, {"dp2 x mp2": DP_MP}, [("ZeRO 2", DP_MP), ("alone", DP_MP), ("dp2 x mp2", SERIAL)]),
        launched("one", 1, {}, [("dp2 x mp2", SERIAL), ("mp2", SERIAL), ("ZeRO 2", ("engine", {}))]),
    ]
    drawn = {name: found["drawn"] for result in results for name, found in result["saved"].items()} | {
        "alone": uninterrupted["saved"]["alone"]["drawn"]
    }
    for result in results:
        for name, found in result["saved"].items():
            np.testing.assert_allclose(found["losses"], first, rtol=0, atol=1e-5, err_msg=name)
        for name, found in result["loaded"].items():
            np.testing.assert_allclose(found["losses"], then, rtol=0, atol=1e-5, err_msg=name)
            assert found["drawn"] == drawn[name.partition(" into ")[0]], name


def serial_losses() -> list[float]:
    """Four steps without a break, of the model of the worker."""
    import sys

    sys.path.insert(0, str(Path(__file__).parent / "workers"))
    try:
        from checkpoints import Training
    finally:
        sys.path.pop(0)
    with paddle.utils.unique_name.guard():
        training = Training(*SERIAL)
        return training.train(0) + training.train(2)


class Net(nn.Layer):
    def __init__(self, width: int = 8):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, width), nn.BatchNorm1D(width), nn.Linear(width, 2)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


def trained(net: nn.Layer, rate: Any = 0.1, kind: str = "Adam", steps: int = 2) -> Any:
    optimizer = getattr(paddle.optimizer, kind)(rate, parameters=net.parameters())
    for _ in range(steps):
        net(paddle.rand([6, 4])).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
    return optimizer


def same(one: nn.Layer, other: nn.Layer) -> bool:
    here, there = one.state_dict(), other.state_dict()
    return all(np.array_equal(here[name].numpy(), there[name].numpy()) for name in here)


def test_buffers_and_a_model_without_its_optimizer(tmp_path: Path) -> None:
    net, other = Net(), Net()
    rbt.save_checkpoint(tmp_path / "c", net, trained(net), extra={"epoch": 3})
    assert rbt.load_checkpoint(tmp_path / "c", other) == {"epoch": 3}
    assert same(net, other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_a_schedule_goes_on_where_it_was(tmp_path: Path) -> None:
    def warm() -> Any:
        return paddle.optimizer.lr.LinearWarmup(paddle.optimizer.lr.CosineAnnealingDecay(0.1, 20), 4, 0.0, 0.1)

    net, here, there = Net(), warm(), warm()
    for _ in range(6):
        here.step()
    rbt.save_checkpoint(tmp_path / "c", net, trained(net, here))
    rbt.load_checkpoint(tmp_path / "c", net, trained(net, there, steps=0))
    for _ in range(6):
        assert there() == pytest.approx(here())
        here.step(), there.step()


def test_weights_of_less_precision_take_and_give_their_master_weights(tmp_path: Path) -> None:
    net = nn.Linear(4, 4)
    net.to(dtype="bfloat16")
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=net.parameters(), multi_precision=True)
    rbt.save_checkpoint(tmp_path / "half", net, optimizer)  # CPUs cannot train in this type
    master = optimizer._master_weights[net.weight.name]
    master.set_value(master + 1e-5)
    rbt.save_checkpoint(tmp_path / "half", net, optimizer)
    whole = nn.Linear(4, 4)
    rbt.load_checkpoint(tmp_path / "half", whole)
    assert np.array_equal(whole.weight.numpy(), master.numpy())
    other = nn.Linear(4, 4)
    other.to(dtype="bfloat16")
    again = paddle.optimizer.AdamW(1e-3, parameters=other.parameters(), multi_precision=True)
    rbt.load_checkpoint(tmp_path / "half", other, again)
    assert np.array_equal(again._master_weights[other.weight.name].numpy(), master.numpy())
    assert np.array_equal(other.weight.numpy(), net.weight.numpy())


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (lambda net: (nn.Sequential(net), None), "another model: it lacks 0.first.weight"),
        (lambda net: (Net(16), None), r"first.weight has the shape \[4, 8\] there and \[4, 16\] here"),
        (lambda net: (net.first, None), "it lacks weight"),
        (lambda net: (net, trained(net, kind="Momentum")), "it lacks state 'velocity' of first.weight: its optimizer is Adam"),
        (lambda net: (net, trained(net, kind="SGD")), "it holds first.bias/beta1_pow_acc"),
        (lambda net: (net, trained(net, paddle.optimizer.lr.StepDecay(0.1, 2))), "a fixed learning rate, .* StepDecay"),
        (lambda net: ("net", None), "are made of an auto.Engine"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, there: Any, message: str) -> None:
    net = Net()
    rbt.save_checkpoint(tmp_path / "c", net, trained(net))
    model, optimizer = there(net)
    with pytest.raises(TunerError, match=message):
        rbt.load_checkpoint(tmp_path / "c", model, optimizer)


def test_what_only_one_of_the_two_has_can_be_left_out(tmp_path: Path) -> None:
    net, part = Net(), nn.Sequential(("first", nn.Linear(4, 8)), ("third", nn.Linear(2, 2)))
    rbt.save_checkpoint(tmp_path / "c", net)
    rbt.load_checkpoint(tmp_path / "c", part, strict=False)
    assert np.array_equal(part.first.weight.numpy(), net.first.weight.numpy())


def damage(folder: Path, how: str) -> None:
    index, file = folder / "index.json", folder / "rank0.safetensors"
    data = json.loads(index.read_text())
    if how == "short":
        file.write_bytes(file.read_bytes()[:-4])
    elif how == "garbled":
        file.write_bytes(b"\xff" * file.stat().st_size)
    elif how == "gone":
        file.unlink()
    elif how == "elsewhere":
        (folder.parent / "rank0.safetensors").write_bytes(file.read_bytes())
        data["files"] = {"../rank0.safetensors": file.stat().st_size}
        index.write_text(json.dumps(data))
    elif how == "hole":
        data["tensors"]["first.weight"]["pieces"] = []
        index.write_text(json.dumps(data))
    elif how == "newer":
        index.write_text(json.dumps(data | {"version": 99}))
    elif how == "pickle":
        index.write_bytes(b"\x80\x04cos\nsystem\n")
    else:
        index.unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("short", "incomplete: rank0.safetensors"), ("garbled", "damaged: rank0.safetensors"), ("gone", "incomplete"),
        ("elsewhere", "incomplete: ../rank0"), ("hole", "parts of first.weight are missing"), ("newer", "version 99"),
        ("pickle", "is not a checkpoint"), ("no index", "is not a checkpoint: index.json: No such file"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, how: str, message: str) -> None:
    net = Net()
    rbt.save_checkpoint(tmp_path / "c", net, trained(net))
    damage(tmp_path / "c", how)
    with pytest.raises(TunerError, match=message):
        rbt.load_checkpoint(tmp_path / "c", net)


def test_a_save_that_fails_leaves_the_checkpoint_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, other = Net(), Net()
    rbt.save_checkpoint(tmp_path / "c", net)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "save_file", full)
        with pytest.raises(TunerError, match=r"cannot be written: .*No space left"):
            rbt.save_checkpoint(tmp_path / "c", Net())
    rbt.load_checkpoint(tmp_path / "c", other)
    assert same(net, other)
    with pytest.raises(TunerError, match="is not a checkpoint"):
        rbt.load_checkpoint(tmp_path / "c.partial", other)


def test_what_is_no_json_cannot_be_kept_beside(tmp_path: Path) -> None:
    with pytest.raises(TunerError, match="extra cannot be kept"):
        rbt.save_checkpoint(tmp_path / "c", Net(), extra={"model": object()})


def engine(net: nn.Layer) -> Any:
    tuning = {"enable": True, "pass_name": "rule_based_tuner"}
    optimizer = paddle.optimizer.Adam(0.1, parameters=net.parameters())
    return auto.Engine(net, nn.CrossEntropyLoss(), optimizer, strategy=auto.Strategy({"tuning": tuning}))


class Rows(paddle.io.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return np.random.default_rng(i).standard_normal(4).astype("float32"), np.array([i % 2])


@pytest.fixture
def alone() -> Any:
    """A scope and names of its own for each engine."""

    def act(use: Any) -> Any:
        paddle.disable_static()
        try:
            with paddle.utils.unique_name.guard(), paddle.static.scope_guard(paddle.static.Scope()):
                return use(engine(Net()))
        finally:
            paddle.disable_static()

    return act


def test_an_engine_saves_and_loads_at_any_time_of_its_life(tmp_path: Path, alone: Any) -> None:
    settings = {"batch_size": 8, "verbose": 0}

    def first(made: Any) -> list[float]:
        made.fit(Rows(), save_dir=str(tmp_path / "dir"), epochs=2, **settings)
        made.save(str(tmp_path / "c"))
        at_save = made.evaluate(Rows(), **settings)["loss"]
        made.fit(Rows(), **settings)
        later = made.evaluate(Rows(), **settings)["loss"]
        made.load(str(tmp_path / "c"))
        assert made.evaluate(Rows(), **settings)["loss"] == at_save
        made.fit(Rows(), **settings)
        assert made.evaluate(Rows(), **settings)["loss"] == pytest.approx(later, abs=1e-6)
        return [at_save, later]

    at_save, later = alone(first)

    def before_its_first_program(made: Any) -> None:
        made.load(str(tmp_path / "c"))
        made.fit(Rows(), **settings)
        assert made.evaluate(Rows(), **settings)["loss"] == pytest.approx(later, abs=1e-6)

    def of_callback_after_evaluation(made: Any) -> None:
        made.evaluate(Rows(), **settings)
        made.load(str(tmp_path / "dir" / "final"))
        assert made.evaluate(Rows(), **settings)["loss"] == at_save
        made.fit(Rows(), **settings)
        assert made.evaluate(Rows(), **settings)["loss"] == pytest.approx(later, abs=1e-6)

    def parameters_alone(made: Any) -> None:
        made.load(str(tmp_path / "c"), load_optimizer=False)
        assert made.evaluate(Rows(), **settings)["loss"] == at_save

    for use in (before_its_first_program, of_callback_after_evaluation, parameters_alone):
        alone(use)
    assert sorted(path.name for path in (tmp_path / "dir").iterdir()) == ["epoch0", "epoch1", "final"]


class Masked(nn.Layer):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 32), nn.Linear(32, 2)

    def forward(self, x):
        return self.second(nn.functional.dropout(self.first(x), 0.5, training=self.training))


class Losses(paddle.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.losses.append(float(logs["loss"]))


def test_a_resumed_engine_draws_the_masks_that_the_first_one_drew(tmp_path: Path) -> None:
    def trained_from(path: str | None) -> list[float]:
        paddle.disable_static()
        with paddle.utils.unique_name.guard(), paddle.static.scope_guard(paddle.static.Scope()):
            made, seen = engine(Masked()), Losses()
            if path is None:
                made.fit(Rows(), batch_size=8, verbose=0)
                made.save(str(tmp_path / "c"))
            else:
                paddle.seed(99)
                made.load(path)
            for size in (8, 4, 8):
                made.fit(Rows(), batch_size=size, verbose=0, callbacks=[seen])
        paddle.disable_static()
        return seen.losses

    losses = trained_from(None)
    assert len(set(losses)) == len(losses)
    assert trained_from(str(tmp_path / "c")) == pytest.approx(losses, abs=1e-6)


def test_an_engine_writes_the_serial_model_to_predict_with(tmp_path: Path, alone: Any) -> None:
    def use(made: Any) -> np.ndarray:
        made.fit(Rows(), batch_size=8, verbose=0)
        made.save(str(tmp_path / "model"), training=False)
        return np.concatenate([outputs[0] for outputs in made.predict(Rows(), batch_size=8, verbose=0)])

    expected = alone(use)
    model = paddle.jit.load(str(tmp_path / "model"))
    model.eval()
    found = model(paddle.to_tensor(np.stack([Rows()[i][0] for i in range(16)])))
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-6)
