"""Training steps in dygraph, and losses of the whole batch, for the scripts beside this one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

import paddle_rbt_plugin as rbt


class WithLoss(nn.Layer):
    """A network of one input that returns its loss for the labels beside it."""

    def __init__(self, network: nn.Layer, loss: Callable[..., Any]):
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, x: Any, labels: Any) -> Any:
        return self.loss(self.network(x), labels)


def train_as(
    entry: str, network: nn.Layer, loss: Callable[..., Any], spec: list[Any], space: dict[str, int], batches: list[Any]
) -> tuple[Any, list[float]]:
    """What is trained, and its losses, on batches of one input and labels: ``entry`` is serial, to_static or dygraph."""
    if entry == "to_static":
        optimizer = paddle.optimizer.AdamW(1e-2, parameters=network.parameters())
        strategy = dist.Strategy({"tuning": {"enable": True, "pass_name": "rule_based_tuner", "search_space": space}})
        static = dist.to_static(network, None, loss, optimizer, strategy, input_spec=[spec[:1], spec[1:]])
        static.train()
        return static, [over_ranks(static(*b)) for b in rbt.engine_plan(static).shard_dataloader(batches)]
    model = WithLoss(network, loss)
    loader: Any = [[paddle.to_tensor(v) for v in b] for b in batches]
    if entry == "dygraph":
        plan = rbt.tune(model, input_spec=spec, search_space=space)
        plan.shard_layer(model)
        loader = plan.shard_dataloader(loader)
    return network, train(model, loader)


def train(model: Any, batches: Iterable[Any]) -> list[float]:
    """The losses of a model that is trained on batches, whole or distributed, with AdamW."""
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    losses = []
    for batch in batches:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(over_ranks(loss))
    return losses


def over_ranks(loss: Any) -> float:
    """The mean over the samples of all ranks, each of which holds that over its own; gloo cannot average by itself."""
    value = loss._local_value() if isinstance(loss, paddle.Tensor) and loss.is_dist() else paddle.to_tensor(loss)
    if dist.get_world_size() == 1:
        return float(value)
    values: list[Any] = []
    dist.all_gather(values, value.reshape([1]))
    return float(np.mean([v.numpy() for v in values]))
