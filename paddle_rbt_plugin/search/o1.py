"""Level o1: one strategy for all layers, stages as even as the layers allow.

    minimise  step(c)  over candidates c  with  peak memory of every stage(c) <= device memory less reserve

Every candidate is bounded from below (``bounds``), by growing micro batch within each factorisation; one that does not fit is
infeasible, and so is the same one with a larger micro batch, since every term of memory grows with it (``_bound``). What is
left is estimated in the order of the bounds until no bound is below the worst of the best ``KEPT`` nor within what the cost
model resolves of the best, so these are the true best (``_best_first``); and in the same way the best of each factorisation, to
compare the winner with. Of equally fast candidates the simplest is best, then the smaller memory, then the smaller degrees
(``result.ranked``), so equal inputs give equal plans. A cost model for which the bounds do not hold is asked about every
candidate instead (``judged``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from paddle_rbt_plugin.cluster import Cluster, stage_meshes
from paddle_rbt_plugin.completion import Completion
from paddle_rbt_plugin.cost.candidate import Candidate, Training
from paddle_rbt_plugin.cost.estimate import RESOLUTION, estimate
from paddle_rbt_plugin.cost.model import Case, Judge
from paddle_rbt_plugin.cost.shared import SharedCosts
from paddle_rbt_plugin.cost.stage_cost import LayerStrategy
from paddle_rbt_plugin.cost.stages import even_stages
from paddle_rbt_plugin.errors import NoFeasiblePlan
from paddle_rbt_plugin.search.analysis import Analysis
from paddle_rbt_plugin.search.bounds import Bound, Bounds
from paddle_rbt_plugin.search.diagnosis import ignored
from paddle_rbt_plugin.search.dimensions import SearchSpace
from paddle_rbt_plugin.search.judged import ask_all
from paddle_rbt_plugin.search.progress import Reporter, Watcher
from paddle_rbt_plugin.search.rejections import Reason, Rejected
from paddle_rbt_plugin.search.result import Evaluated, Misses, SearchResult, explain_failure, order_of, ranked
from paddle_rbt_plugin.search.space import Degrees, candidate_dict, variants, ways
from paddle_rbt_plugin.spelling import counted

KEPT = 20
"""How many of the best candidates are estimated exactly and shown."""

Bounded = tuple[float, tuple[str, ...], Candidate]
"""Lower bound of the step, and an order for equal bounds."""


class Deadline:
    """When to stop: ``limit`` seconds from now, never for None."""

    def __init__(self, limit: float | None = None):
        self._limit = limit
        self._end = None if limit is None else time.monotonic() + limit
        self.stopped = ""
        """Says that the search was stopped; empty while it was not."""

    def passed(self, where: str) -> bool:
        """Whether it is time to stop; ``where`` says what is left undone."""
        if self._end is None or time.monotonic() < self._end:
            return False
        self.stopped = self.stopped or f"stopped by the time limit of {self._limit:g} s: {where}; this is the best so far"
        return True


class Search:
    """The state of one search: what its levels share."""

    def __init__(
        self,
        analysis: Analysis,
        cluster: Cluster,
        training: Training,
        space: SearchSpace,
        memory_reserve: float = 0.1,
        progress: Watcher | None = None,
        time_limit: float | None = None,
        judge: Judge | None = None,
    ):
        self.analysis = analysis
        self.cluster = cluster
        self.training = training
        self.space = space
        self.memory_reserve = memory_reserve
        self.judge = judge
        """The cost model that ranks the candidates; None for the analytic model itself."""
        self.progress = Reporter(progress)
        self.deadline = Deadline(time_limit)
        self.shared = SharedCosts(cluster, training)
        self.bounds = Bounds(self.shared, memory_reserve)

    def on(self, cluster: Cluster) -> Search:
        """The same search on another cluster, under the same deadline."""
        judge = None if self.judge is None else self.judge.on(cluster)
        other = Search(self.analysis, cluster, self.training, self.space, self.memory_reserve, judge=judge)
        other.deadline = self.deadline
        other.progress = self.progress
        other.shared = self.shared.on(cluster)
        other.bounds = Bounds(other.shared, self.memory_reserve)
        return other

    @property
    def bounded(self) -> bool:
        """Whether no step is predicted shorter than the analytic lower bounds, so that they prune exactly."""
        return self.judge is None or (self.judge.bounded and not self.judge.predicts_memory)

    @property
    def resolution(self) -> float:
        """Relative difference of two step times below which neither is faster."""
        return RESOLUTION if self.judge is None else self.judge.resolution

    @property
    def predicts_memory(self) -> bool:
        """Whether a cost model of its own, not the analytic one, says what fits."""
        return self.judge is not None and self.judge.predicts_memory

    def completion(self, candidate: Candidate) -> Completion:
        """The completion of a stage's mesh."""
        pp, chunks = candidate.pp, candidate.vpp
        mesh = stage_meshes(self.cluster, pp, candidate.dp, candidate.mp, candidate.axes, candidate.ep)[0]
        if pp == 1 or self.training.own_copies:
            return self.analysis.complete(mesh)
        return self.analysis.complete(mesh, even_stages(self.analysis.layers.count, pp, chunks))

    def evaluate(
        self,
        candidate: Candidate,
        stage_layers: tuple[int, ...] | None = None,
        layers: tuple[LayerStrategy, ...] | None = None,
    ) -> Evaluated:
        """The exact cost of a candidate."""
        completion = self.completion(candidate)
        analytic = estimate(
            completion,
            candidate,
            self.cluster,
            self.training,
            memory_reserve=self.memory_reserve,
            stage_layers=stage_layers,
            layers=layers,
            shared=self.shared,
        )
        judged = analytic
        if self.judge is not None:
            judged = self.judge.estimate(Case(candidate, completion, analytic, stage_layers, layers))
        return Evaluated(candidate, judged, stage_layers, layers, analytic.step_time_s)


def run_o1(search: Search) -> SearchResult:
    """Level o1 of a search. Raises NoFeasiblePlan, which names the binding resource and the nearest candidate."""
    found, rejected = ways(search.analysis, search.cluster, search.training, search.space)
    misses = Misses()
    fitting: dict[Degrees, list[Bounded]] = {}
    considered = 0
    for done, degrees in enumerate(found):
        search.progress(done, len(found), degrees.to_dict())
        if fitting and search.deadline.passed(
            f"not tried: {len(found) - done} of {counted(len(found), 'way')} to use the devices"
        ):
            break
        fits, count, reasons = _bound(search, degrees, misses)
        considered += count
        rejected += reasons
        if fits:
            fitting[degrees] = fits
            if search.bounded:
                least, _, candidate = min(fits)
                search.progress.found(least, candidate_dict(candidate), is_estimated=False)
    asked = ""
    if search.bounded:
        best = _best_by_bounds(search, fitting)
    else:
        best, asked = ask_all(search, fitting, misses, KEPT)
    rejected += misses.rejected()
    if not best:
        raise NoFeasiblePlan(explain_failure(search.cluster, search.space, rejected))
    feasible = tuple(ranked(best.values(), search.resolution))
    winner = feasible[0]
    without_meaning = ignored(search.space, search.training.mode == "train")
    notes = tuple(filter(None, (search.deadline.stopped, asked, without_meaning)))
    return SearchResult(
        winner, search.completion(winner.candidate), feasible, tuple(rejected), considered, tuple(filter(None, notes))
    )


def _bound(search: Search, degrees: Degrees, misses: Misses) -> tuple[list[Bounded], int, list[Rejected]]:
    """The candidates of one factorisation that fit, how many were looked at, and rejections of whole orders of axes."""
    fits: list[Bounded] = []
    completions: dict[tuple[str, ...], Completion] = {}
    lost: dict[tuple[str, ...], Reason | None] = {}
    too_large: set[tuple[object, ...]] = set()
    count = 0
    for candidate in variants(search.analysis, search.cluster, search.training, search.space, degrees):
        count += 1
        if candidate.axes not in lost:
            completions[candidate.axes] = search.completion(candidate)
            lost[candidate.axes] = search.analysis.lost_sharding(completions[candidate.axes])
        if lost[candidate.axes]:
            continue
        kind = _without_micro_batch(candidate)
        if kind in too_large:
            misses.skip(degrees)
            continue
        bound: Bound = search.bounds.of(completions[candidate.axes], candidate)
        if bound.missing_bytes > 0 and not search.predicts_memory:
            too_large.add(kind)
            misses.add(degrees, candidate, bound)
        else:
            fits.append((bound.step_time_s, order_of(candidate), candidate))
    reasons = [Rejected(degrees.to_dict() | {"axes": list(axes)}, why) for axes, why in lost.items() if why]
    return fits, count, reasons


def _without_micro_batch(c: Candidate) -> tuple[object, ...]:
    return c.axes, c.recompute, c.sharding_stage, c.sharding_degree, c.sequence_parallel, c.schedule, c.vpp


def _best_by_bounds(search: Search, fitting: Mapping[Degrees, Sequence[Bounded]]) -> dict[Candidate, Evaluated]:
    """The best candidates, and the best of each factorisation."""
    best = _best_first(search, [b for fits in fitting.values() for b in fits], KEPT)
    for degrees, fits in fitting.items():
        if search.deadline.passed("not every way to use the devices was compared"):
            break
        if not any(Degrees.of(c) == degrees for c in best):
            best |= _best_first(search, fits, 1)
    return best


def _best_first(search: Search, bounded: Sequence[Bounded], count: int) -> dict[Candidate, Evaluated]:
    """The best ``count`` candidates with their exact costs, and what was estimated to find them."""
    done: dict[Candidate, Evaluated] = {}
    times: list[float] = []
    for bound, candidate in _ascending(bounded):
        if len(times) >= count and bound > max(sorted(times)[count - 1], min(times) * (1 + search.resolution)):
            break
        if times and search.deadline.passed("not every candidate that may be among the best was estimated"):
            break
        done[candidate] = search.evaluate(candidate)
        if done[candidate].estimate.fits:
            times.append(done[candidate].estimate.step_time_s)
            search.progress.found(times[-1], candidate_dict(candidate), is_estimated=True)
    return {c: e for c, e in done.items() if e.estimate.fits}


def _ascending(bounded: Sequence[Bounded]) -> Iterator[tuple[float, Candidate]]:
    for bound, _, candidate in sorted(bounded, key=lambda b: b[:2]):
        yield bound, candidate
