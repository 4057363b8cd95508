"""Models in which Paddle leaves values partial, or moves them, before an op that reads them: each is trained for two steps
alone and by two processes along ``mp`` or ``dp``; every rank writes the largest difference of a loss, and of a weight over how
far training has moved it.

    python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo partial_values.py OUT
"""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.nn import functional as F
from paddle.static import InputSpec

import paddle_rbt_plugin as rbt

WORDS, WIDTH, BATCH, LENGTH, STEPS = 64, 32, 8, 8, 2


class Network(nn.Layer):
    """Whatever layers the models here use; ``shape`` says how."""

    def __init__(self, shape: Callable[[Network, Any], Any]):
        super().__init__()
        self.shape = shape
        self.words, self.others = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.padded = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = self.create_parameter([WIDTH], default_initializer=nn.initializer.Constant(1.0))
        self.token = self.create_parameter([1, 1, WIDTH])
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias_attr=False)

    def inner(self, x: Any) -> Any:
        return F.gelu(self.up(x))

    def ffn(self, x: Any) -> Any:
        return self.down(self.inner(x))

    def forward(self, ids: Any) -> Any:
        return self.shape(self, ids)


def rms_norm(n: Network, x: Any) -> Any:
    return x * n.scale / paddle.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)


def halves_swapped(x: Any) -> Any:
    a, b = paddle.split(x, 2, -1)
    return paddle.concat([b, a], -1)


def with_token(n: Network, x: Any) -> Any:
    return paddle.concat([n.token.expand([BATCH, 1, WIDTH]), x], 1)[:, :LENGTH]


def attended(x: Any) -> Any:
    return paddle.bmm(F.softmax(paddle.bmm(x, x.transpose([0, 2, 1]))), x)


def token_loss(logits: Any, labels: Any) -> Any:
    return F.cross_entropy(logits, labels.unsqueeze(-1), reduction="none").mean()


def smoothed(logits: Any, labels: Any) -> Any:
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def masked(logits: Any, labels: Any) -> Any:
    kept = (labels > WORDS // 4).astype("float32")
    losses = F.cross_entropy(logits, labels.unsqueeze(-1), reduction="none").squeeze(-1)
    return (losses * kept).sum() / kept.sum() * 0.5 + 1e-3 * (logits * logits).mean()


SHAPES: dict[str, Callable[[Network, Any], Any]] = {
    "embedding, layer norm": lambda n, i: n.head(n.norm(n.words(i))),
    "embedding, rms norm": lambda n, i: n.head(rms_norm(n, n.words(i))),
    "embedding, concat": lambda n, i: n.head(paddle.concat([n.words(i)[:, :4], n.others(i)[:, 4:]], 1)),
    "embedding, concat with a token": lambda n, i: n.head(with_token(n, n.words(i))),
    "embedding, stack": lambda n, i: n.head(paddle.stack([n.words(i), n.others(i)]).max(0)),
    "embedding, slice": lambda n, i: n.head(paddle.concat([n.words(i)[:, 1:], n.words(i)[:, :1]], 1)),
    "padded embedding": lambda n, i: n.head(n.padded(i) + n.words(i)),
    "divided product, split": lambda n, i: n.head(halves_swapped(n.ffn(n.words(i)))),
    "divided product, quotient": lambda n, i: n.head(n.ffn(n.words(i)) / (1 + paddle.exp(n.ffn(n.others(i))))),
    "divided product, expand": lambda n, i: n.head(n.ffn(n.words(i)[:1].expand([BATCH, LENGTH, WIDTH]) + n.others(i))),
    "divided product, square": lambda n, i: n.head(n.ffn(n.words(i)) ** 2),
    "norm of a divided dimension": lambda n, i: n.head(
        n.ffn(n.words(i)) * paddle.linalg.norm(n.inner(n.words(i)), axis=-1, keepdim=True)
    ),
    "logsumexp of a divided dimension": lambda n, i: n.head(
        n.ffn(n.words(i)) * paddle.logsumexp(n.inner(n.words(i)), axis=-1, keepdim=True)
    ),
    "batched products": lambda n, i: n.head(attended(n.ffn(n.words(i)))),
    "running sum": lambda n, i: n.head(paddle.cumsum(n.ffn(n.words(i)), axis=-1) / WIDTH),
}


def cases() -> Iterator[tuple[str, str, Callable[..., Any], Callable[..., Any], Callable[..., Any]]]:
    """Name, axis, shape, loss, and what makes the optimizer of parameters."""

    def sgd(parameters: Any) -> Any:
        return paddle.optimizer.SGD(0.5, parameters=parameters)

    for name, shape in SHAPES.items():
        for axis in ("mp", "dp"):
            yield name, axis, shape, token_loss, sgd
    plain = SHAPES["embedding, layer norm"]
    for axis in ("mp", "dp"):
        yield "label smoothing", axis, plain, smoothed, sgd
        yield "masked loss, halved, with a penalty", axis, plain, masked, sgd
    for name in ("Momentum", "Adagrad", "NAdam", "RAdam", "Adamax"):
        # An epsilon like this keeps rounding of gradients that are zero from moving weights.
        make = functools.partial(getattr(paddle.optimizer, name), 0.05, **({} if name == "Momentum" else {"epsilon": 1e-3}))
        yield name, "mp", lambda n, i: n.head(n.ffn(n.words(i))), token_loss, lambda ps, make=make: make(parameters=ps)
    clip = nn.ClipGradByNorm(0.05)
    yield "clipped one by one", "mp", plain, token_loss, lambda ps: paddle.optimizer.SGD(0.5, parameters=ps, grad_clip=clip)
    clip = nn.ClipGradByValue(1e-3)
    yield "clipped by value", "mp", plain, token_loss, lambda ps: paddle.optimizer.SGD(0.5, parameters=ps, grad_clip=clip)


def batches() -> list[list[np.ndarray]]:
    tokens = np.random.default_rng(0).integers(0, WORDS, [STEPS, BATCH, LENGTH + 1])
    return [[t[:, :-1], t[:, 1:]] for t in tokens]


def built(shape: Any, make: Any) -> tuple[Network, Any]:
    paddle.seed(7)
    network = Network(shape)
    return network, make(network.parameters())


def alone(shape: Any, loss: Any, make: Any) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """The losses, and the weights before and after."""
    network, optimizer = built(shape, make)
    before = {name: p.numpy() for name, p in network.named_parameters()}
    losses = []
    for ids, labels in batches():
        value = loss(network(paddle.to_tensor(ids)), paddle.to_tensor(labels))
        value.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(value))
    return losses, before, {name: p.numpy() for name, p in network.named_parameters()}


def together(axis: str, shape: Any, loss: Any, make: Any) -> tuple[list[float], dict[str, Any]]:
    """The losses that this rank shows, and its weights with the slices of the whole ones that they are."""
    network, optimizer = built(shape, make)
    space = {axis: 2, "pp": 1, "sharding_stage": 0, "recompute": "none"}
    strategy = dist.Strategy({"tuning": {"enable": True, "pass_name": "rule_based_tuner", "search_space": space}})
    spec = [[InputSpec([BATCH, LENGTH], "int64", "ids")], [InputSpec([BATCH, LENGTH], "int64", "labels")]]
    names = {name: p.name for name, p in network.named_parameters()}
    model = dist.to_static(network, None, loss, optimizer, strategy, input_spec=spec)
    model.train()
    plan = rbt.engine_plan(model)
    losses = [float(model(*batch)) for batch in plan.shard_dataloader(batches())]
    weights = {}
    for name, value in model.state_dict("param").items():
        local = np.array(value._local_value() if value.is_dist() else value)
        planned = plan.tensors.get(names[name])
        dims = planned.dims_mapping if planned is not None else (-1,) * local.ndim
        rank = dist.get_rank()
        parts = zip(dims, local.shape, strict=True)
        index = tuple(slice(None) if d < 0 else slice(rank * n, (rank + 1) * n) for d, n in parts)
        weights[name] = (local, index)
    return losses, weights


def differences(axis: str, shape: Any, loss: Any, make: Any) -> dict[str, float]:
    losses, before, after = alone(shape, loss, make)
    shown, weights = together(axis, shape, loss, make)
    moved = {name: max(float(abs(after[name] - before[name]).max()), 1e-2) for name in after}
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(shown, losses, strict=True)),
        "weight": max(float(abs(local - after[n][index]).max()) / moved[n] for n, (local, index) in weights.items()),
    }


def main(out: str) -> None:
    paddle.set_device("cpu")
    dist.init_parallel_env()
    found: dict[str, Any] = {}
    for name, axis, *case in cases():
        paddle.disable_static()
        with paddle.utils.unique_name.guard(), paddle.static.scope_guard(paddle.static.Scope()):
            try:
                found[f"{name}, {axis}"] = differences(axis, *case)
            except Exception:
                found[f"{name}, {axis}"] = traceback.format_exc()[-2000:]
    with open(f"{out}.{dist.get_rank()}", "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
