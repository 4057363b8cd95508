"""Level o1: one strategy for all layers, stages as even as the layers allow.

All candidates are completed and costed; the fastest that fits wins. Ties go to the smaller memory, then to the smaller
degrees of pp and mp, so equal inputs give equal plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paddle_rbt_plugin.cluster import Cluster, describe_axis, stage_meshes
from paddle_rbt_plugin.completion import Completion
from paddle_rbt_plugin.cost.candidate import Candidate, Training
from paddle_rbt_plugin.cost.estimate import Estimate, estimate
from paddle_rbt_plugin.errors import NoFeasiblePlan
from paddle_rbt_plugin.search.analysis import Analysis
from paddle_rbt_plugin.search.space import Rejected, SearchSpace, candidate_dict, candidates

Progress = Callable[[int, int], None]
"""Called with the number of candidates done and their total."""


@dataclass(frozen=True)
class Evaluated:
    """A candidate that can run, and what it costs."""

    candidate: Candidate
    estimate: Estimate


@dataclass(frozen=True)
class SearchResult:
    """The winner with its completion, the others that can run (best first), and those that cannot."""

    best: Evaluated
    completion: Completion
    feasible: tuple[Evaluated, ...]
    rejected: tuple[Rejected, ...]


def search_o1(
    analysis: Analysis,
    cluster: Cluster,
    training: Training,
    space: SearchSpace,
    memory_reserve: float = 0.1,
    progress: Progress | None = None,
) -> SearchResult:
    """Finds the best candidate. Raises NoFeasiblePlan, which names the binding resource and the nearest candidate."""
    tried, rejected = candidates(analysis, cluster, training, space)
    feasible: list[Evaluated] = []
    for done, candidate in enumerate(tried):
        if progress is not None:
            progress(done, len(tried))
        completion = _complete(analysis, cluster, candidate)
        reason = analysis.lost_sharding(completion)
        if reason:
            rejected.append(Rejected(candidate_dict(candidate), reason))
            continue
        cost = estimate(completion, candidate, cluster, training, memory_reserve=memory_reserve)
        if cost.fits:
            feasible.append(Evaluated(candidate, cost))
        else:
            rejected.append(_too_large(candidate, cost))
    if not feasible:
        raise NoFeasiblePlan(_explain_failure(cluster, tried, rejected))
    feasible.sort(key=lambda e: (e.estimate.step_time_s, e.estimate.peak_memory_bytes, _rank(e.candidate)))
    best = feasible[0]
    return SearchResult(best, _complete(analysis, cluster, best.candidate), tuple(feasible), tuple(rejected))


def _complete(analysis: Analysis, cluster: Cluster, candidate: Candidate) -> Completion:
    return analysis.complete(stage_meshes(cluster, candidate.pp, candidate.dp, candidate.mp, candidate.axes)[0])


def _rank(candidate: Candidate) -> tuple[str, ...]:
    """A total order that depends on nothing but the candidate: smaller degrees first."""
    return tuple(f"{value:>6}" if isinstance(value, int) else str(value) for value in candidate_dict(candidate).values())


def _too_large(candidate: Candidate, cost: Estimate) -> Rejected:
    worst = max(cost.stages, key=lambda stage: stage.peak_memory_bytes - stage.memory_limit_bytes)
    missing = worst.peak_memory_bytes - worst.memory_limit_bytes
    reason = (
        f"needs {worst.peak_memory_bytes / 2**30:.1f} GiB, {missing / 2**30:.1f} GiB more than the "
        f"{worst.memory_limit_bytes / 2**30:.1f} GiB that {worst.device} has less its reserve"
    )
    return Rejected(candidate_dict(candidate), reason, missing_bytes=math.ceil(missing))


def _explain_failure(cluster: Cluster, tried: list[Candidate], rejected: list[Rejected]) -> str:
    short_of_memory = [r for r in rejected if r.missing_bytes > 0]
    if short_of_memory:
        nearest = min(short_of_memory, key=lambda r: r.missing_bytes)
        return (
            f"no plan fits the memory of {cluster}: the nearest candidate, {_spell(nearest)}, {nearest.reason}; use more or "
            "larger devices, recompute or sharding"
        )
    reasons = "; ".join(f"{_spell(r)}: {r.reason}" for r in rejected[:8])
    return f"no way to use the {cluster.device_count} devices of {cluster} is legal for this model: {reasons}"


def _spell(rejected: Rejected) -> str:
    c = rejected.candidate
    text = f"pp {c['pp']} x dp {c['dp']} x mp {c['mp']}"
    if "micro_batch" in c:
        text += f" with micro batch {c['micro_batch']}, recompute {c['recompute']}"
    return text


def where_axes_run(cluster: Cluster, candidate: Candidate) -> list[str]:
    """Sentences on where the groups of each axis of the winner communicate, for the explanation."""
    mesh = stage_meshes(cluster, candidate.pp, candidate.dp, candidate.mp, candidate.axes)[0]
    return [describe_axis(mesh, axis, cluster) for axis in mesh.axes]
