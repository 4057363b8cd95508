"""Level o1 under a cost model that knows no bounds.

The analytic lower bounds say nothing about the answers of such a model, so nothing can be left out by them: it is asked about
every candidate that fits. Only beyond ``MOST_ASKED`` candidates are they chosen beforehand, of each factorisation of the
devices equally many, those whose analytic bounds are the smallest; the plan says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from paddle_rbt_plugin.cost.candidate import Candidate
from paddle_rbt_plugin.notes import Note, note
from paddle_rbt_plugin.search.bounds import Bound, Fitting, ascending
from paddle_rbt_plugin.search.result import Evaluated, Misses, ranked
from paddle_rbt_plugin.search.space import Degrees, candidate_dict, order_of
from paddle_rbt_plugin.search.state import Search

MOST_ASKED = 1000
"""Candidates that a cost model without bounds is asked about."""


def ask_all(
    search: Search, fitting: Mapping[Degrees, Sequence[Fitting]], misses: Misses, kept: int
) -> tuple[dict[Candidate, Evaluated], Note]:
    """The best ``kept`` candidates by the search's cost model and the best of each factorisation, and a note on how they were
    found. Those that do not fit by that model are added to ``misses``."""
    total = sum(len(some) for found in fitting.values() for some in found)
    share = total if total <= MOST_ASKED else max(1, MOST_ASKED // len(fitting))
    nearest = (bounded for found in fitting.values() for bounded in islice(ascending(found), share))
    asked = [candidate for _, candidate in sorted(nearest, key=lambda b: (b[0], order_of(b[1])))]
    fits: list[Evaluated] = []
    for done, candidate in enumerate(asked):
        search.progress(done, len(asked), candidate_dict(candidate))
        if fits and search.deadline.passed("cost_model", left=len(asked) - done):
            break
        evaluated = search.evaluate(candidate)
        if evaluated.estimate.fits:
            fits.append(evaluated)
            search.progress.found(evaluated.estimate.step_time_s, candidate_dict(candidate), is_estimated=True)
        else:
            misses.add(candidate, _bound(evaluated))
    best = ranked(fits, search.resolution)
    first: dict[Degrees, Evaluated] = {}
    for evaluated in best:
        first.setdefault(Degrees.of(evaluated.candidate), evaluated)
    assert search.judge is not None
    how = note("asked", cost_model=search.judge.source, asked=len(asked), total=total)
    return {e.candidate: e for e in (*best[:kept], *first.values())}, how


def _bound(evaluated: Evaluated) -> Bound:
    estimate = evaluated.estimate
    smallest = min(estimate.stages, key=lambda stage: stage.memory_limit_bytes)
    return Bound(estimate.step_time_s, estimate.peak_memory_bytes, smallest.memory_limit_bytes, smallest.device)
