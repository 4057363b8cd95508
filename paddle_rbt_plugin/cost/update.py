"""What a step does once, after its micro batches: gradient synchronisation, clipping and the optimizer.

Gradients are all-reduced over the data-parallel group in buckets; ZeRO stages 1 and 2 reduce-scatter them and all-gather the
updated parameters, the same bytes in all. Stage 3 keeps no whole parameters and gathers them for every forward and again for
every backward pass instead (arXiv 1910.02054, section 7.2). Where the training overlaps gradients with backward, a bucket goes
out as soon as it is full, during the last micro batch; what does not fit beside that backward pass is exposed, the last
bucket at least.

The update streams every state through memory (bytes per element): read and write master copy and states, read the gradient,
write the parameter; clipping reads the gradients once for the norm and rescales them; loss scaling looks at them once more.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paddle_rbt_plugin.cost.candidate import Training
from paddle_rbt_plugin.cost.communication import GroupNetwork, collective_seconds, larger, split_network
from paddle_rbt_plugin.cost.compute import ComputeDevice
from paddle_rbt_plugin.cost.constants import Constants
from paddle_rbt_plugin.cost.memory import OPTIMIZER_STATES, gradient_itemsize


def update_bytes(training: Training) -> float:
    """Bytes moved per parameter element by clipping, unscaling and the optimizer."""
    grad = gradient_itemsize(training)
    weight = 4.0 if training.precision == "fp32" else 4.0 + 1.0  # the master copy read and written, half a copy written
    moved = grad + 2 * weight + 8.0 * OPTIMIZER_STATES[training.optimizer]
    clip = 3.0 * grad
    unscale = 2.0 * grad if training.precision == "fp16" else 0.0
    return moved + clip + unscale


def update_seconds(parameters: Any, training: Training, device: ComputeDevice, c: Constants) -> Any:
    """Time of the optimizer step for ``parameters`` elements updated on one device."""
    return parameters * update_bytes(training) / (device.bandwidth * c.update_peak)


def gradient_sync_seconds(
    nbytes: Any, sharding_stage: int, shards: int, net: GroupNetwork | None, c: Constants
) -> tuple[Any, Any]:
    """Time to bring gradients of ``nbytes`` to the ranks that update them, and parameters to those that use them under ZeRO:
    seconds once per step, and seconds in every micro batch. ``nbytes`` may be an array.

    Stages 2 and 3 do not keep whole gradients and reduce them in every micro batch, stage 3 gathers parameters twice in each.
    Where states are split over a part of the group only, of ``shards`` ranks, all this stays inside the part, and once per step
    each rank reduces its split of the gradients with its counterparts in the other parts."""
    if net is None:
        return 0.0 * nbytes, 0.0 * nbytes
    buckets = _buckets(nbytes, c)
    size, times = nbytes / buckets, buckets * (nbytes > 0)
    if sharding_stage == 0:
        return times * collective_seconds("all_reduce", size, net, c), 0.0 * nbytes
    across = 0.0 * nbytes
    if shards < net.ranks:
        net, others = split_network(net, shards)
        across = times * collective_seconds("all_reduce", size / shards, others, c)
    reduce = times * collective_seconds("reduce_scatter", size, net, c)
    gather = times * collective_seconds("all_gather", size, net, c)
    once = across + (reduce if sharding_stage == 1 else 0.0) + (gather if sharding_stage < 3 else 0.0)
    each = (reduce if sharding_stage > 1 else 0.0 * nbytes) + (2.0 * gather if sharding_stage == 3 else 0.0)
    return once, each


def exposed_seconds(seconds: Any, nbytes: Any, backward: Any, c: Constants) -> Any:
    """What of a synchronisation of ``seconds`` is left after the backward pass of ``backward`` seconds that it runs beside."""
    return larger(seconds / _buckets(nbytes, c), seconds - backward)


def _buckets(nbytes: Any, c: Constants) -> Any:
    return np.maximum(1.0, np.ceil(nbytes / c.bucket_bytes))
