"""Batch norms of a sharded batch: the samples stay where they are, and only the statistics are summed over the ranks.

Paddle has no rule for ``batch_norm`` and gathers the batch. In training the statistics of the serial program are those of the
whole batch, so each rank sums what it holds of x and x^2, and an all-reduce of two numbers per channel finishes the sums. The
gradients of scale and bias, which the gradients of the statistics follow from, take another one. With m and v the mean and the
variance, ' for a value that no gradient flows through, and e the epsilon, a rank computes

    batch_norm(x, m', v', scale sqrt(v' + e) / sqrt(v + e), bias + scale (m' - m) / sqrt(v + e))

on its samples by Paddle's own kernel with fixed statistics: the value is that of the norm, and so is the gradient, since m and
v are functions of x. In evaluation, or with ``use_global_stats``, nothing is summed but the gradients of scale and bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.question import Operand
from paddle_rbt_plugin.completion.sample_wise import LocalPlacements

BATCH_NORM = "batch_norm"
SUMS = 2
"""Numbers per channel that one all-reduce in forward and another one in backward sum up."""
CHANNELS_LAST = ("NHWC", "NDHWC", "NLC")
"""The formats of data in which the last dimension holds the channels; elsewhere the second one does."""
FORWARD_TRAFFIC, BACKWARD_TRAFFIC = 3.0, 4.0
"""Bytes that these ops read and write over those of one kernel, in tensors as large as x.

One kernel: 2 forward (x, result), 3 backward (x and two gradients). These: 6 forward (x for its sum; x, x^2 and x^2 again for
the sum of squares; x and result of the norm) and 12 backward (3 of the norm, 2 for the gradients of the sums, 3 of the square,
4 to add them up)."""


def shards_samples(op: str, operands: Sequence[Placement]) -> bool:
    """Whether an op is a batch norm whose samples are sharded; its first operand holds them."""
    return op.removesuffix("_") == BATCH_NORM and operands[0].dims_mapping[:1] >= (0,)


def has_fixed_statistics(attrs: Mapping[str, Any]) -> bool:
    """Whether a batch norm reads its statistics instead of computing them."""
    return bool(attrs["use_global_stats"] or (attrs["is_test"] and not attrs["trainable_statistics"]))


def sums_statistics(op: str, attrs: Mapping[str, Any], operands: Sequence[Placement]) -> bool:
    """Whether an op is a batch norm that sums statistics over the ranks which share its samples."""
    return shards_samples(op, operands) and not has_fixed_statistics(attrs)


def batch_norm_placements(attrs: Mapping[str, Any], operands: Sequence[Operand], result_dims: Sequence[int]) -> LocalPlacements:
    """How a batch norm lies whose samples are sharded; its first result is the norm."""
    axis = operands[0].placement.dims_mapping[0]
    needs = tuple(Placement.along(axis if i == 0 else -1, len(o.shape)) for i, o in enumerate(operands))
    results = tuple(Placement.along(axis if i == 0 else -1, ndim) for i, ndim in enumerate(result_dims))
    split = {axis} if has_fixed_statistics(attrs) else set()
    return LocalPlacements(needs, (needs[0], *(need.summands(split) for need in needs[1:])), results)
