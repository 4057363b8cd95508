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

from math import ceil

from paddle_rbt_plugin.cost.candidate import Candidate, Training
from paddle_rbt_plugin.cost.communication import GroupNetwork, collective_seconds, split_network
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


def update_seconds(parameters: float, training: Training, device: ComputeDevice, c: Constants) -> float:
    """Time of the optimizer step for ``parameters`` elements updated on one device."""
    return parameters * update_bytes(training) / (device.bandwidth * c.update_peak)


def gradient_sync_seconds(nbytes: float, candidate: Candidate, net: GroupNetwork, c: Constants) -> float:
    """Time to bring gradients of ``nbytes`` to the ranks that update them, and parameters to those that use them under ZeRO.

    Per step; stages 2 and 3 do not keep whole gradients and reduce them in every micro batch, stage 3 gathers parameters
    twice in each. Where states are split over a part of the group only, all this stays inside the part, and once per step each
    rank reduces its split of the gradients with its counterparts in the other parts."""
    if net.ranks == 1 or not nbytes:
        return 0.0
    buckets = max(1, ceil(nbytes / c.bucket_bytes))
    size = nbytes / buckets
    if candidate.sharding_stage == 0:
        return buckets * collective_seconds("all_reduce", size, net, c)
    shards, across = candidate.shards(net.ranks), 0.0
    if shards < net.ranks:
        net, others = split_network(net, shards)
        across = buckets * collective_seconds("all_reduce", size / shards, others, c)
    reduce = buckets * collective_seconds("reduce_scatter", size, net, c)
    gather = buckets * collective_seconds("all_gather", size, net, c)
    repeats = candidate.accumulate_steps if candidate.sharding_stage >= 2 else 1
    return reduce * repeats + gather * (2 * repeats if candidate.sharding_stage == 3 else 1) + across


def exposed_seconds(seconds: float, nbytes: float, backward: float, c: Constants) -> float:
    """What of a synchronisation of ``seconds`` is left after the backward pass of ``backward`` seconds that it runs beside."""
    last = seconds / max(1, ceil(nbytes / c.bucket_bytes))
    return max(last, seconds - backward)
