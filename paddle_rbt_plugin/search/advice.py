"""What would serve a model better than what was asked for: more devices where nothing fits, another global batch where the one
given cannot be divided among the devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from paddle_rbt_plugin.cluster import Cluster, stage_meshes
from paddle_rbt_plugin.cluster.mesh import smallest_factor
from paddle_rbt_plugin.cost.candidate import Candidate
from paddle_rbt_plugin.cost.estimates import estimate
from paddle_rbt_plugin.errors import NoFeasiblePlan
from paddle_rbt_plugin.notes import Note, note
from paddle_rbt_plugin.search.dimensions import divisors
from paddle_rbt_plugin.search.result import Evaluated
from paddle_rbt_plugin.search.state import Search

_DOUBLINGS = 10
_MOST_IN_A_MACHINE = 8
"""Devices up to which a machine is taken to grow; beyond that there are more machines."""
_WORTH = 1.1
"""How many times faster another batch must be to be named."""


def enough_devices(search: Search, fits: Callable[[Search], bool]) -> Cluster | None:
    """The first cluster on which anything ``fits``, twice as large again and again; None where none is, or where machines
    differ."""
    for cluster in _larger(search.cluster):
        try:
            if fits(search.on(cluster)):
                return cluster
        except NoFeasiblePlan:  # the search space does not use so many devices
            continue
    return None


def _larger(cluster: Cluster) -> Iterator[Cluster]:
    if len(cluster.groups) > 1:
        return
    (group,) = cluster.groups
    for _ in range(_DOUBLINGS):
        if group.machines == 1 and 2 * group.devices_per_machine <= _MOST_IN_A_MACHINE:
            group = replace(group, devices_per_machine=2 * group.devices_per_machine)
        else:
            group = replace(group, machines=2 * group.machines)
        yield Cluster((group,))


def other_batch(search: Search, winner: Evaluated) -> Note | None:
    """A global batch near the one given that all devices could share as replicas, where that is faster per sample than the
    winner, which divides the devices otherwise; None where there is none."""
    devices, batch = search.cluster.device_count, search.training.global_batch
    space = search.space
    if batch % devices == 0 or space.forbids("dp", devices) or space.forbids("pp", 1) or space.forbids("mp", 1):
        return None
    if search.judge is not None and not search.bounded:  # the analytic model does not say what is faster
        return None
    nearest = sorted(
        (n for n in (batch - batch % devices, batch - batch % devices + devices) if n), key=lambda n: abs(n - batch)
    )
    now = winner.estimate.step_time_s / batch
    found = _seconds_of_replicas(search, winner.candidate, nearest[0])
    if found is None or found / nearest[0] * _WORTH > now:
        return None
    return note("other_batch", devices=devices, batch=batch, other=nearest[0], now_s=now, then_s=found / nearest[0])


def _seconds_of_replicas(search: Search, winner: Candidate, batch: int) -> float | None:
    """The least time of a step in which all devices are replicas; None where none that is tried fits."""
    analysis, devices = search.analysis, search.cluster.device_count
    replicas = smallest_factor(analysis.batch)
    if replicas == 1:
        return None
    mesh = stage_meshes(search.cluster, 1, devices, 1)[0]
    small = replace(mesh, shape=tuple(replicas if axis == "dp" else n for axis, n in zip(mesh.axes, mesh.shape, strict=True)))
    completion = analysis.on(small, {"dp": replicas}).complete(small)
    training = replace(search.training, global_batch=batch)
    share = batch // devices
    times = []
    for recompute in dict.fromkeys(("none", winner.recompute)):
        for stage in dict.fromkeys((0, 1, winner.sharding_stage)):
            if search.space.forbids("recompute", recompute) or search.space.forbids("sharding_stage", stage):
                continue
            for micro_batch in reversed(divisors(share)):
                candidate = Candidate(
                    1, devices, 1, micro_batch, share // micro_batch, recompute=recompute, sharding_stage=stage
                )
                found = estimate(
                    replace(completion, mesh=mesh), candidate, search.cluster, training, memory_reserve=search.memory_reserve
                )
                if found.fits:
                    times.append(found.step_time_s)
                    break
    return min(times, default=None)
