"""What a model is trained to: a loss for every output, in the spellings that training scripts use, and the labels it reads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from random_models.blocks import Value

Tensor = paddle.Tensor
IGNORED = -100


class Criterion(nn.Layer):
    """The losses of all outputs, added up: ``criterion(*outputs, *labels)``."""

    def __init__(self, outputs: Sequence[dict[str, Any]]):
        super().__init__()
        self.losses = [_loss_of(o["loss"], o["form"]) for o in outputs]
        self.counts = [_label_count(o["form"]) for o in outputs]

    def forward(self, *values: Tensor) -> Tensor:
        total, taken = None, len(self.losses)
        for i in range(len(self.losses)):
            value = self.losses[i](values[i], *values[taken : taken + self.counts[i]])
            taken += self.counts[i]
            total = value if total is None else total + value
        return total


def label_arrays(output: dict[str, Any], value: Value, batch: int, random: np.random.Generator) -> list[np.ndarray]:
    """The labels of one batch for one output, whose value is ``value``."""
    shape = (batch, *value.shape)
    if output["loss"] == "distance":
        return [random.standard_normal(shape).astype("float32")]
    if output["form"] == "soft_labels":
        scores = np.exp(random.standard_normal(shape))
        return [(scores / scores.sum(-1, keepdims=True)).astype("float32")]
    labels = random.integers(0, shape[-1], shape[:-1]).astype("int64")
    if output["form"] == "ignore_index":
        labels[random.random(labels.shape) < 0.2] = IGNORED
    if output["form"] in ("masked", "masked_sum"):
        return [labels, (random.random(labels.shape) < 0.7).astype("float32")]
    return [labels]


def _label_count(form: str) -> int:
    return 2 if form in ("masked", "masked_sum") else 1


def _loss_of(kind: str, form: str) -> Any:
    return functools.partial(_cross_entropy if kind == "cross_entropy" else _distance, form)


def _cross_entropy(form: str, out: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    if form == "layer":
        return nn.CrossEntropyLoss()(out, labels.unsqueeze(-1))
    if form == "none_mean":
        return F.cross_entropy(out, labels.unsqueeze(-1), reduction="none").mean()
    if form == "half":
        return F.cross_entropy(out, labels) * 0.5
    if form == "penalty":
        return F.cross_entropy(out, labels) + 1e-2 * (out * out).mean()
    if form == "mean_again":
        return F.cross_entropy(out, labels).mean()
    if form == "sum_over_batch":
        return F.cross_entropy(out, labels, reduction="sum") / (8 * out.shape[0])
    if form == "masked":
        return (F.cross_entropy(out, labels, reduction="none").squeeze(-1) * mask).sum() / mask.sum()
    if form == "masked_sum":
        return (F.cross_entropy(out, labels, reduction="none").reshape(mask.shape) * mask).sum() / 64
    if form == "smoothing_argument":
        return F.cross_entropy(out, labels, label_smoothing=0.1)
    if form == "smoothing_labels":
        smooth = F.label_smooth(F.one_hot(labels, out.shape[-1]), epsilon=0.1)
        return F.cross_entropy(out, smooth, soft_label=True)
    if form == "soft_labels":
        return F.cross_entropy(out, labels, soft_label=True)
    if form == "log_softmax":
        return -(F.log_softmax(out, axis=-1) * F.one_hot(labels, out.shape[-1])).sum(-1).mean()
    if form == "softmax_with":
        return F.softmax_with_cross_entropy(out, labels.unsqueeze(-1)).mean()
    if form == "ignore_index":
        return F.cross_entropy(out, labels, ignore_index=IGNORED)
    return F.cross_entropy(out, labels)


def _distance(form: str, out: Tensor, target: Tensor) -> Tensor:
    if form == "l1":
        return F.l1_loss(out, target)
    if form == "smooth_l1":
        return F.smooth_l1_loss(out, target)
    if form == "square_mean":
        return (out - target).square().mean()
    if form == "half":
        return 0.5 * F.mse_loss(out, target)
    if form == "none_mean":
        return F.mse_loss(out, target, reduction="none").mean()
    if form == "sum_over_batch":
        return ((out - target) ** 2).sum() / (64 * out.shape[0])
    if form == "penalty":
        return F.mse_loss(out, target) + 1e-2 * out.abs().mean()
    return F.mse_loss(out, target)
