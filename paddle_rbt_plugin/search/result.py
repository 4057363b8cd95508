"""What a search hands back, and how candidates are ranked.

Of the candidates whose steps are predicted to take as long as the fastest, within what the cost model resolves, the one that
asks least of the user and of Paddle wins: no plan is more complicated for a gain that the estimate cannot tell from none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.completion import Completion
from paddle_rbt_plugin.cost.candidate import Candidate
from paddle_rbt_plugin.cost.estimates import Estimate
from paddle_rbt_plugin.cost.stage_costs import LayerStrategy
from paddle_rbt_plugin.notes import Note
from paddle_rbt_plugin.search.bounds import Bound
from paddle_rbt_plugin.search.dimensions import SearchSpace
from paddle_rbt_plugin.search.rejections import Reason, Rejected, reason
from paddle_rbt_plugin.search.space import Degrees, candidate_dict, order_of
from paddle_rbt_plugin.spelling import counted, spell_candidate


@dataclass(frozen=True)
class Evaluated:
    """A candidate that can run, and what it costs. Level o2 also says how many layers each chunk has and how each runs."""

    candidate: Candidate
    estimate: Estimate
    stage_layers: tuple[int, ...] | None = None
    layers: tuple[LayerStrategy, ...] | None = None
    analytic_s: float = 0.0
    """Step time by the analytic model, whichever model the estimate is of."""

    @property
    def rank(self) -> tuple[Any, ...]:
        """A total order that depends on nothing but the candidate: time, then memory, then smaller degrees."""
        return self.estimate.step_time_s, self.estimate.peak_memory_bytes, order_of(self.candidate)

    @property
    def complexity(self) -> tuple[int, ...]:
        """What the candidate asks for beyond replicas that run the model as it is, the hardest to do first: strategies layer by
        layer (level o2); how many of the choices that change model or schedule (sequence parallelism, interleaving,
        recomputation, ZeRO over a part of the replicas); then stages, tensor-parallel and expert-parallel ranks, ZeRO stage,
        chunks."""
        c = self.candidate
        special = c.sequence_parallel, c.vpp > 1, c.recompute != "none", c.sharding_degree != "whole"
        return self.layers is not None, sum(special), c.pp, c.mp, c.ep, c.sharding_stage, c.vpp


@dataclass(frozen=True)
class SearchResult:
    """The winner with its completion, the best of the others that can run (best first), and what cannot."""

    best: Evaluated
    completion: Completion
    feasible: tuple[Evaluated, ...]
    rejected: tuple[Rejected, ...]
    considered: int
    """Candidates whose cost was computed or bounded."""
    notes: tuple[Note, ...] = ()
    ranks: tuple[int, ...] | None = None
    """Where level o3 reorders the groups of the cluster: the rank in the cluster of each rank in the plan."""


def ranked(found: Iterable[Evaluated], resolution: float) -> list[Evaluated]:
    """The winner, then the others by time. It is the simplest of all that are within ``resolution``, a relative difference, of
    the fastest, and the fastest of these where several are equally simple.

    What is less simple than a winner can take its place only by being faster, so a level that adds such candidates (o2) never
    has a slower winner."""
    by_time = sorted(found, key=lambda e: e.rank)
    limit = by_time[0].estimate.step_time_s * (1 + resolution) if by_time else 0.0
    alike = (e for e in by_time if e.estimate.step_time_s <= limit)
    winner = min(alike, key=lambda e: e.complexity, default=None)
    return sorted(by_time, key=lambda e: e is not winner)


class Misses:
    """Counts the candidates of each factorisation that do not fit, and keeps the nearest."""

    def __init__(self) -> None:
        self._nearest: dict[Degrees, tuple[Candidate, Bound]] = {}
        self._counts: dict[Degrees, int] = {}

    def add(self, candidate: Candidate, bound: Bound, count: int = 1) -> None:
        """Adds some candidates, of which this is the nearest."""
        degrees = Degrees.of(candidate)
        self._counts[degrees] = self._counts.get(degrees, 0) + count
        known = self._nearest.get(degrees)
        if known is None or bound.missing_bytes < known[1].missing_bytes:
            self._nearest[degrees] = candidate, bound

    def rejected(self) -> list[Rejected]:
        """One rejection per factorisation, for all of its candidates that do not fit."""
        return [
            Rejected(candidate_dict(candidate), _short_of_memory(bound), self._counts[degrees])
            for degrees, (candidate, bound) in self._nearest.items()
        ]


def _short_of_memory(bound: Bound) -> Reason:
    missing, peak, limit = (math.ceil(n) for n in (bound.missing_bytes, bound.peak_memory_bytes, bound.memory_limit_bytes))
    return reason("memory", missing_bytes=missing, peak_bytes=peak, limit_bytes=limit, device=bound.device)


def explain_failure(cluster: Cluster, space: SearchSpace, rejected: Sequence[Rejected], enough: Cluster | None = None) -> str:
    """Why nothing can run: the nearest candidate and by how much it misses, or what rules each factorisation out. ``enough`` is
    a cluster on which something fits."""
    short_of_memory = [r for r in rejected if r.missing_bytes > 0]
    if short_of_memory:
        nearest = min(short_of_memory, key=lambda r: r.missing_bytes)
        theirs = (f.name for f in fields(space) if f.compare and f.name not in space.reasons)
        fixed = [key for key in theirs if getattr(space, key) is not None]
        return (
            f"no plan fits the memory of {cluster}: the nearest candidate, {spell_candidate(nearest.candidate)}, "
            f"{nearest.reason}; use more or larger devices"
            + (f" ({enough} is enough)" if enough else "")
            + (f", or leave {', '.join(fixed)} out of search_space" if fixed else "")
        )
    devices = counted(cluster.device_count, "device")
    return f"no way to use the {devices} of {cluster} is legal for this model: {_reasons(rejected)}"


def _reasons(rejected: Iterable[Rejected]) -> str:
    """The reasons, each once, with the first factorisation it holds for."""
    first: dict[str, Rejected] = {}
    for r in rejected:
        first.setdefault(str(r.reason), r)
    shown = [f"{spell_candidate(r.candidate)}: {why}" for why, r in first.items()]
    return "; ".join(shown[:8]) + (f"; and {counted(len(shown) - 8, 'more reason')}" if len(shown) > 8 else "")
