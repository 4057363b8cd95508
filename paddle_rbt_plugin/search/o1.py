"""Level o1: one strategy for all layers, stages as even as the layers allow.

    minimise  step(c)  over candidates c  with  peak memory of every stage(c) <= device memory less reserve

Every candidate is bounded from below (``bounds``), by growing micro batch within each factorisation; one that does not fit is
infeasible, and so is the same one with a larger micro batch, since every term of memory grows with it (``_bound``). What is
left is estimated in the order of the bounds until no bound is below the worst of the best ``KEPT`` nor within what the cost
model resolves of the best, so these are the true best (``_best_first``); and in the same way the best of each factorisation, to
compare the winner with. Of equally fast candidates the simplest is best, then the smaller memory, then the smaller degrees
(``result.ranked``), so equal inputs give equal plans. A cost model for which the bounds do not hold is asked about every
candidate instead (``unpruned``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paddle_rbt_plugin.completion import Completion
from paddle_rbt_plugin.cost.candidate import Candidate
from paddle_rbt_plugin.errors import NoFeasiblePlan
from paddle_rbt_plugin.notes import Note, distinct
from paddle_rbt_plugin.search.bounds import Bound
from paddle_rbt_plugin.search.diagnosis import ignored
from paddle_rbt_plugin.search.rejections import Reason, Rejected
from paddle_rbt_plugin.search.result import Bounded, Evaluated, Misses, SearchResult, ascending, explain_failure, ranked
from paddle_rbt_plugin.search.space import Degrees, candidate_dict, variants, ways
from paddle_rbt_plugin.search.state import Search
from paddle_rbt_plugin.search.unpruned import ask_all

KEPT = 20
"""How many of the best candidates are estimated exactly and shown."""


def run_o1(search: Search) -> SearchResult:
    """Level o1 of a search. Raises NoFeasiblePlan, which names the binding resource and the nearest candidate."""
    found, rejected = ways(search.analysis, search.cluster, search.training, search.space)
    misses = Misses()
    fitting: dict[Degrees, list[Bounded]] = {}
    considered = 0
    for done, degrees in enumerate(found):
        search.progress(done, len(found), degrees.to_dict())
        if fitting and search.deadline.passed("ways", left=len(found) - done, total=len(found)):
            break
        fits, count, reasons = _bound(search, degrees, misses)
        considered += count
        rejected += reasons
        if fits:
            fitting[degrees] = fits
            if search.bounded:
                least, candidate = next(ascending(fits))
                search.progress.found(least, candidate_dict(candidate), is_estimated=False)
    asked: Note | None = None
    if search.bounded:
        best = _best_by_bounds(search, fitting)
    else:
        best, asked = ask_all(search, fitting, misses, KEPT)
    rejected += misses.rejected()
    if not best:
        raise NoFeasiblePlan(explain_failure(search.cluster, search.space, rejected))
    feasible = tuple(ranked(best.values(), search.resolution))
    winner = feasible[0]
    notes = distinct(search.deadline.stopped, asked, ignored(search.space, search.training.mode == "train"))
    return SearchResult(winner, search.completion(winner.candidate), feasible, tuple(rejected), considered, notes)


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
            fits.append((bound.step_time_s, candidate))
    reasons = [Rejected(degrees.to_dict() | {"axes": list(axes)}, why) for axes, why in lost.items() if why]
    return fits, count, reasons


def _without_micro_batch(c: Candidate) -> tuple[object, ...]:
    return c.axes, c.recompute, c.sharding_stage, c.sharding_degree, c.sequence_parallel, c.schedule, c.vpp


def _best_by_bounds(search: Search, fitting: Mapping[Degrees, Sequence[Bounded]]) -> dict[Candidate, Evaluated]:
    """The best candidates, and the best of each factorisation."""
    best = _best_first(search, [b for fits in fitting.values() for b in fits], KEPT)
    for degrees, fits in fitting.items():
        if search.deadline.passed("comparison"):
            break
        if not any(Degrees.of(c) == degrees for c in best):
            best |= _best_first(search, fits, 1)
    return best


def _best_first(search: Search, bounded: Sequence[Bounded], count: int) -> dict[Candidate, Evaluated]:
    """The best ``count`` candidates with their exact costs, and what was estimated to find them."""
    done: dict[Candidate, Evaluated] = {}
    times: list[float] = []
    for bound, candidate in ascending(bounded):
        if len(times) >= count and bound > max(sorted(times)[count - 1], min(times) * (1 + search.resolution)):
            break
        if times and search.deadline.passed("estimates"):
            break
        done[candidate] = search.evaluate(candidate)
        if done[candidate].estimate.fits:
            times.append(done[candidate].estimate.step_time_s)
            search.progress.found(times[-1], candidate_dict(candidate), is_estimated=True)
    return {c: e for c, e in done.items() if e.estimate.fits}
