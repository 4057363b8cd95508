"""Level o3: clusters of several kinds of machines.

    minimise   T of level o2  over the orders of the cluster's groups of machines

Stages take the ranks in order, so the order of the groups says which devices the first layers run on, and the cut of level
o2 gives each stage as many layers as its devices compute and hold (``StageRuns`` knows the device of its stage). Every order is
searched as a cluster of its own; groups of equal machines are not exchanged, since nothing changes. The order as described
comes first, and so level o3 is never worse than o2; a cluster of equal machines has one order, and o2's plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, permutations

from paddle_rbt_plugin.cluster import Cluster, MachineGroup
from paddle_rbt_plugin.errors import NoFeasiblePlan
from paddle_rbt_plugin.notes import distinct
from paddle_rbt_plugin.search.o2 import run_o2
from paddle_rbt_plugin.search.result import SearchResult
from paddle_rbt_plugin.search.state import Search

MOST_GROUPS = 5
"""Groups that are put in every order (120 of them); of more, the order as described and its reverse are searched."""


def run_o3(search: Search) -> SearchResult:
    """Level o3 of a search. Raises NoFeasiblePlan where no order of the groups has a plan."""
    best: SearchResult | None = None
    failure: NoFeasiblePlan | None = None
    orders = list(_orders(search.cluster))
    for i, order in enumerate(orders):
        if best is not None and search.deadline.passed("orders", left=len(orders) - i, total=len(orders)):
            best = replace(best, notes=distinct(search.deadline.stopped, *best.notes))
            break
        try:
            result = run_o2(search if i == 0 else search.on(Cluster(tuple(search.cluster.groups[g] for g in order))))
        except NoFeasiblePlan as error:
            failure = failure or error
            continue
        if best is None or result.best.estimate.step_time_s * (1 + search.resolution) < best.best.estimate.step_time_s:
            best = replace(result, ranks=_ranks(search.cluster, order) if i else None)
    if best is None:
        assert failure is not None
        raise failure
    return best


def _orders(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Orders of the groups that differ in more than the exchange of equal machines; the present one first."""
    numbers = tuple(range(len(cluster.groups)))
    some = permutations(numbers) if len(numbers) <= MOST_GROUPS else iter((numbers, numbers[::-1]))
    seen: set[tuple[MachineGroup, ...]] = set()
    for order in some:
        kinds = tuple(cluster.groups[g] for g in order)
        if kinds not in seen and (not seen or not cluster.is_homogeneous):
            seen.add(kinds)
            yield order


def _ranks(cluster: Cluster, order: tuple[int, ...]) -> tuple[int, ...]:
    """Rank in the cluster of each rank in the reordered one."""
    ends = list(accumulate(g.device_count for g in cluster.groups))
    return tuple(r for g in order for r in range(ends[g] - cluster.groups[g].device_count, ends[g]))
