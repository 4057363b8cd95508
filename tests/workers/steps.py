"""Training steps in dygraph, and losses of the whole batch, for the scripts beside this one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist


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
