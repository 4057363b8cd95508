"""Level o1: one strategy for all layers, stages as even as the layers allow.

    minimise  step(c)  over candidates c  with  peak memory of every stage(c) <= device memory less reserve

Every candidate is bounded from below (``bounds``), those that differ in their micro batches only at once. What fits is
estimated in the order of the bounds until no bound is below the worst of the best ``KEPT`` nor within what the cost model
resolves of the best, so these are the true best (``_best_first``); and in the same way the best of each factorisation, to
compare the winner with. Of equally fast candidates the simplest is best, then the smaller memory, then the smaller degrees
(``result.ranked``), so equal inputs give equal plans. A cost model for which the bounds do not hold is asked about every
candidate instead (``unpruned``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from paddle_rbt_plugin.cost.candidate import Candidate
from paddle_rbt_plugin.errors import NoFeasiblePlan
from paddle_rbt_plugin.notes import Note, distinct
from paddle_rbt_plugin.search.advice import enough_devices, other_batch
from paddle_rbt_plugin.search.bounds import Fitting, ascending
from paddle_rbt_plugin.search.diagnosis import ignored
from paddle_rbt_plugin.search.rejections import Reason, Rejected
from paddle_rbt_plugin.search.result import Evaluated, Misses, SearchResult, explain_failure, ranked
from paddle_rbt_plugin.search.space import Degrees, candidate_dict, families, ways
from paddle_rbt_plugin.search.state import Search
from paddle_rbt_plugin.search.unpruned import ask_all

KEPT = 20
"""How many of the best candidates are estimated exactly and shown."""


def run_o1(search: Search) -> SearchResult:
    """Level o1 of a search. Raises NoFeasiblePlan, which names the binding resource and the nearest candidate."""
    found, rejected = ways(search.analysis, search.cluster, search.training, search.space)
    misses = Misses()
    fitting: dict[Degrees, list[Fitting]] = {}
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
        enough = enough_devices(search, _anything_fits) if any(r.missing_bytes > 0 for r in rejected) else None
        raise NoFeasiblePlan(explain_failure(search.cluster, search.space, rejected, enough))
    feasible = tuple(ranked(best.values(), search.resolution))
    winner = feasible[0]
    notes = distinct(
        search.deadline.stopped, asked, ignored(search.space, search.training.mode == "train"), other_batch(search, winner)
    )
    return SearchResult(winner, search.completion(winner.candidate), feasible, tuple(rejected), considered, notes)


def _anything_fits(search: Search) -> bool:
    found, _ = ways(search.analysis, search.cluster, search.training, search.space)
    return any(_bound(search, degrees, Misses())[0] for degrees in found)


def _bound(search: Search, degrees: Degrees, misses: Misses) -> tuple[list[Fitting], int, list[Rejected]]:
    """The candidates of one factorisation that fit, how many were looked at, and rejections of whole orders of axes."""
    fits: list[Fitting] = []
    lost: dict[tuple[str, ...], Reason | None] = {}
    count = 0
    for family in families(search.analysis, search.cluster, search.training, search.space, degrees):
        axes = family.candidate.axes
        count += len(family.micro_batches)
        if axes not in lost:
            lost[axes] = search.unusable(family.candidate)
        if lost[axes]:
            continue
        bounds = search.bounds(family)
        fitting = bounds.missing_bytes <= (np.inf if search.predicts_memory else 0.0)
        if fitting.any():
            fits.append(bounds.fitting(np.flatnonzero(fitting)))
        if not fitting.all():
            nearest = int(np.where(fitting, np.inf, bounds.missing_bytes).argmin())
            misses.add(family.member(nearest), bounds.of(nearest), int((~fitting).sum()))
    reasons = [Rejected(degrees.to_dict() | {"axes": list(axes)}, why) for axes, why in lost.items() if why]
    return fits, count, reasons


def _best_by_bounds(search: Search, fitting: Mapping[Degrees, Sequence[Fitting]]) -> dict[Candidate, Evaluated]:
    """The best candidates, and the best of each factorisation."""
    best = _best_first(search, [b for fits in fitting.values() for b in fits], KEPT)
    for degrees, fits in fitting.items():
        if search.deadline.passed("comparison"):
            break
        if not any(Degrees.of(c) == degrees for c in best):
            best |= _best_first(search, fits, 1)
    return best


def _best_first(search: Search, fitting: Sequence[Fitting], count: int) -> dict[Candidate, Evaluated]:
    """The best ``count`` candidates with their exact costs, and what was estimated to find them."""
    done: dict[Candidate, Evaluated] = {}
    times: list[float] = []
    for bound, candidate in ascending(fitting):
        if len(times) >= count and bound > max(sorted(times)[count - 1], min(times) * (1 + search.resolution)):
            break
        if times and search.deadline.passed("estimates"):
            break
        done[candidate] = search.evaluate(candidate)
        if done[candidate].estimate.fits:
            times.append(done[candidate].estimate.step_time_s)
            search.progress.found(times[-1], candidate_dict(candidate), is_estimated=True)
    return {c: e for c, e in done.items() if e.estimate.fits}
