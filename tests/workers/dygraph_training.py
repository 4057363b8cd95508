"""Trains in dygraph under plans, and writes how far weights, states and losses are from serial ones, and what a rank holds.

    python -m paddle.distributed.launch --nproc_per_node N --backend gloo dygraph_training.py DEGREES CASES OUT

``DEGREES`` is JSON; ``CASES`` names cases of ``CASES`` below, with semicolons, or is ``all``.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.static import InputSpec
from steps import over_ranks

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.handover.dygraph.optimizer import ELEMENTWISE

WIDTH, WORDS, LENGTH, BATCH, STEPS = 16, 24, 4, 8, 3
SPEC = [InputSpec([BATCH, LENGTH], "int64", "ids"), InputSpec([BATCH, LENGTH, 1], "int64", "labels")]


class Block(nn.Layer):
    """A feed-forward network with a bias that nothing divides evenly, and an argument by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.runs = 0
        self.scale = self.create_parameter([1], default_initializer=nn.initializer.Constant(1.5))

    def forward(self, x, *, parts):
        self.runs += 1
        return x + self.scale * self.down(nn.functional.gelu(self.up(self.norm(x)))), {"parts": parts["n"]}


class Network(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.LayerList([Block() for _ in range(3)])

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for block in self.blocks:
            x, parts = block(x, parts={"n": 3})
        assert parts == {"parts": 3}
        return nn.functional.cross_entropy(self.head(self.norm(x)), labels)


class Normalized(Network):
    """The weight of the head is normalized, and that of a spectral norm, when they are read: weights made of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for block in self.blocks:
            x, _ = block(x, parts={"n": 3})
        x = self.norm(self.middle(x))
        logits = nn.functional.linear(x, nn.functional.normalize(self.head.weight, axis=0), self.head.bias)
        return nn.functional.cross_entropy(logits, labels)


class Halved(nn.Layer):
    """Weights in bfloat16, for which CPUs lack most kernels, so they are read in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS).to(dtype="bfloat16")

    def forward(self, ids, labels):
        weight, bias = (p.astype("float32") for p in (self.head.weight, self.head.bias))
        return nn.functional.cross_entropy(nn.functional.linear(self.embedding(ids), weight, bias), labels)


@dataclass(frozen=True)
class Case:
    """How a network is trained. ``optimizer`` makes an optimizer of the parameters of a model."""

    optimizer: Callable[[Any], Any]
    space: dict[str, Any]
    accumulate: int = 1
    prepare: Callable[[Any], Any] = lambda model: model
    schedule: bool = False
    network: type[nn.Layer] = Network
    resumes: bool = False
    """Whether the states of the serial run are loaded, too, before another step."""


def of(name: str, rate: Any = 0.05, **options: Any) -> Callable[[Any], Any]:
    return lambda model: getattr(paddle.optimizer, name)(rate, parameters=model.parameters(), **options)


def scheduled(model: Any) -> Any:
    rate = paddle.optimizer.lr.StepDecay(0.1, step_size=1, gamma=0.5)
    return paddle.optimizer.AdamW(rate, parameters=model.parameters())


def grouped(model: Any) -> Any:
    groups = [
        {"params": model.embedding.parameters(), "learning_rate": 0.5, "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if "embedding" not in n], "grad_clip": nn.ClipGradByGlobalNorm(0.2)},
    ]
    return paddle.optimizer.AdamW(0.05, parameters=groups)


def without_a_clip_of_norms(model: Any) -> Any:
    for norm in (layer for layer in model.sublayers() if isinstance(layer, nn.LayerNorm)):
        norm.weight.need_clip = False
    return model


CLIP = nn.ClipGradByGlobalNorm(0.1)
DECAY = paddle.regularizer.L2Decay(0.1)
CASES = {
    **{f"{name}, stage 1": Case(of(name), {"sharding_stage": 1}) for name in ELEMENTWISE},
    **{f"{name}, stage 0": Case(of(name), {"sharding_stage": 0}) for name in ("SGD", "Momentum", "AdamW", "RMSProp", "Lamb")},
    "stage 2": Case(of("AdamW"), {"sharding_stage": 2}, resumes=True),
    "clip": Case(of("Momentum", grad_clip=CLIP), {"sharding_stage": 1}),
    "clip, stage 0": Case(of("Momentum", grad_clip=CLIP), {"sharding_stage": 0}),
    "clip, stage 2": Case(of("Momentum", grad_clip=CLIP), {"sharding_stage": 2}),
    "clip of some": Case(of("SGD", 0.5, grad_clip=CLIP), {"sharding_stage": 2}, prepare=without_a_clip_of_norms),
    "clip by norm": Case(of("Momentum", grad_clip=nn.ClipGradByNorm(0.05)), {"sharding_stage": 1}),
    "clip by value": Case(of("Momentum", grad_clip=nn.ClipGradByValue(0.01)), {"sharding_stage": 2}),
    "decay": Case(of("Momentum", weight_decay=DECAY), {"sharding_stage": 1}),
    "decay of magnitude": Case(of("Adam", weight_decay=paddle.regularizer.L1Decay(0.1)), {"sharding_stage": 2}),
    "schedule": Case(scheduled, {"sharding_stage": 1}, schedule=True),
    "groups": Case(grouped, {"sharding_stage": 2}),
    "accumulation": Case(of("AdamW", grad_clip=CLIP), {"sharding_stage": 1}, accumulate=2),
    "accumulation, stage 2": Case(of("AdamW", grad_clip=CLIP), {"sharding_stage": 2}, accumulate=2),
    "master weights": Case(of("Momentum", 0.5, multi_precision=True), {"sharding_stage": 1}, network=Halved),
    "weights made of weights, stage 0": Case(of("Momentum"), {"sharding_stage": 0}, network=Normalized),
    "several tensors at once": Case(of("Momentum", use_multi_tensor=True), {"sharding_stage": 1}),
    "recomputation": Case(of("AdamW"), {"sharding_stage": 0, "recompute": "full"}),
    "recomputation, stage 2": Case(of("AdamW", grad_clip=CLIP), {"sharding_stage": 2, "recompute": "full"}, accumulate=2),
}


def batches() -> Iterator[list[Any]]:
    random = np.random.default_rng(0)
    for _ in range(2 * STEPS):
        tokens = random.integers(0, WORDS, [BATCH, LENGTH + 1])
        yield [paddle.to_tensor(tokens[:, :-1]), paddle.to_tensor(tokens[:, 1:, None])]


def built(case: Case) -> Any:
    paddle.seed(7)
    with paddle.utils.unique_name.guard():
        return case.prepare(case.network())


def train(case: Case, model: Any, optimizer: Any, feeds: list[list[Any]]) -> list[float]:
    losses = []
    for step in range(STEPS):
        for feed in feeds[step * case.accumulate : (step + 1) * case.accumulate]:
            loss = model(*feed)
            (loss / case.accumulate).backward()
            losses.append(over_ranks(loss.astype("float32")))
        optimizer.step()
        optimizer.clear_grad()
        if case.schedule:
            optimizer._learning_rate.step()
    return losses


def whole(tensor: Any) -> np.ndarray:
    tensor = dist.unshard_dtensor(tensor) if tensor.is_dist() else tensor
    return tensor.astype("float32").numpy()


def states(optimizer: Any) -> list[Any]:
    """Every state that is one for each element of a parameter, in order."""
    tables = [*optimizer._accumulators.items(), ("master", getattr(optimizer, "_master_weights", {}))]
    single = ("pow", "beta", "rho", "mu_product", "m")
    return [t for name, table in sorted(tables, key=lambda item: item[0]) if not name.endswith(single) for t in table.values()]


def size(tensors: list[Any]) -> int:
    return sum(int(np.prod((t._local_value() if t.is_dist() else t).shape)) for t in tensors)


def difference(ours: list[Any], theirs: list[Any]) -> float:
    pairs = zip(map(whole, ours), map(whole, theirs), strict=True)
    return max((float(np.abs(a - b).max()) for a, b in pairs), default=0.0)


def resumed(case: Case, plan: Any, model: Any, ours: Any, serial: Any, optimizer: Any) -> dict[str, float]:
    """Differences of weights after more steps, of which other optimizers take the states over: those of the serial run, and
    those of this one. Their names hold numbers that a process counts, so each is made as if it were the first."""
    plain = {name: t.numpy() if isinstance(t, paddle.Tensor) else t for name, t in optimizer.state_dict().items()}
    weights = [p.clone() for p in model.parameters()]
    given = {"resumed from serial": plain, "resumed": dict(ours.state_dict())}
    train(case, serial, optimizer, list(batches()))
    found = {}
    for name, state in given.items():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            copy = value.clone()
            parameter.get_tensor()._share_data_with(copy.get_tensor())
        with paddle.utils.unique_name.guard():
            again = plan.shard_optimizer(case.optimizer(model))
            again.set_state_dict(state)
            train(case, model, again, list(plan.shard_dataloader(list(batches()))))
        found[name] = difference(list(model.parameters()), list(serial.parameters()))
    return found


def run(case: Case, degrees: dict[str, int]) -> dict[str, Any]:
    serial = built(case)
    with paddle.utils.unique_name.guard():
        optimizer = case.optimizer(serial)
        expected = train(case, serial, optimizer, list(batches()))
    model = built(case)
    space = {"pp": 1, "recompute": "none"} | case.space | degrees | ({"sharding_stage": 0} if degrees["dp"] == 1 else {})
    plan = rbt.tune(model, input_spec=SPEC, search_space=space)
    plan.shard_layer(model)
    for block in getattr(model, "blocks", []):
        block.runs = 0  # tracing ran them, too
    with paddle.utils.unique_name.guard():
        ours = plan.shard_optimizer(case.optimizer(model))
        losses = train(case, model, ours, list(plan.shard_dataloader(list(batches()))))
    runs = sum(block.runs for block in getattr(model, "blocks", [])) / len(losses)
    return {
        "losses": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "weights": difference(list(model.parameters()), list(serial.parameters())),
        "states": difference(states(ours), states(optimizer)),
        "held": size(states(ours)),
        "whole": size(states(optimizer)),
        "runs": runs,
        **(resumed(case, plan, model, ours, serial, optimizer) if case.resumes else {}),
    }


def momentum_with_master_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """The update that GPUs have a kernel for, in place of the one that CPUs lack."""

    def update(param: Any, gradient: Any, velocity: Any, rate: Any, master: Any, momentum: float, *rest: Any) -> Any:
        if master is None:
            return original(param, gradient, velocity, rate, master, momentum, *rest)
        velocity.scale_(momentum).add_(gradient.astype("float32"))
        master.subtract_(rate * velocity)
        return param.copy_(master.astype(param.dtype), True)

    return update


def main(degrees: str, names: str, out: str) -> None:
    paddle.set_device("cpu")
    dist.init_parallel_env()
    warnings.simplefilter("ignore")
    paddle._C_ops.momentum_ = momentum_with_master_weights(paddle._C_ops.momentum_)
    found = {}
    chosen = list(CASES) if names == "all" else names.split(";")
    if json.loads(degrees)["mp"] > 1:  # CPUs cut no tensor in bfloat16
        chosen = [name for name in chosen if CASES[name].network is not Halved]
    for name in chosen:
        found[name] = run(CASES[name], json.loads(degrees))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
