"""Level o2: every layer has its own strategy, and stages are cut where it is best.

    minimise   T = sum_s t_s + (m - 1) max_s t_s
    over       cuts of the layers into pp runs, and a strategy for each layer of each run
    with       memory of every run <= device memory less reserve

T is the makespan of FThenB and 1F1B with m micro batches and equal stages; t and the memory of a run are defined in ``runs``.
For each way to divide devices and batch (``_settings``) the dynamic programme ``cut`` goes over (layers done, stages done) and
keeps every (sum t, max t) that no other beats, so the cut and the strategies of least T are found;
``tests/test_search_levels.py`` compares it with trying everything.

The winner of each setting is then estimated as any other candidate, pipeline simulated, and the best estimate wins. No setting
is left out that holds a plan whose estimate is better (``_least``); of the plans of one setting only those are looked for whose
T is, which differs from the estimate by what it simplifies: stages that differ, and what ``layer_costs`` says. The winner
of level o1 takes part, so level o2 is never worse. The interleaved schedule, whose chunks Paddle cuts evenly, comes from o1.
Under a cost model without bounds, settings and cuts are those that the analytic model finds; which of them wins is that one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from paddle_rbt_plugin.cost.candidate import Candidate
from paddle_rbt_plugin.cost.pipeline import in_flight
from paddle_rbt_plugin.cost.stage_costs import LayerStrategy
from paddle_rbt_plugin.notes import distinct
from paddle_rbt_plugin.search.layer_costs import CLOSING, LayerCosts, Option, option_of
from paddle_rbt_plugin.search.o1 import run_o1
from paddle_rbt_plugin.search.rejections import Reason
from paddle_rbt_plugin.search.result import Evaluated, SearchResult, ranked
from paddle_rbt_plugin.search.runs import StageRuns, Way
from paddle_rbt_plugin.search.space import candidate_dict, variants, ways
from paddle_rbt_plugin.search.state import Search

_BY_LAYER = frozenset({"dp", "mp", "micro_batch", "recompute"})
"""What a strategy of a layer says."""


@dataclass(frozen=True)
class Cut:
    """A way to run all layers: what the objective says, and per stage how many layers and the options of each."""

    seconds: float
    stage_layers: tuple[int, ...]
    options: tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """What all layers have in common; ``options`` are the strategies they choose from. ``candidate`` is that of the first."""

    candidate: Candidate
    options: tuple[Option, ...]

    @property
    def common(self) -> dict[str, Any]:
        """What all layers have in common, as a candidate says it."""
        return {key: value for key, value in candidate_dict(self.candidate).items() if key not in _BY_LAYER}


def run_o2(search: Search) -> SearchResult:
    """Level o2 of a search. Raises NoFeasiblePlan where no candidate with one strategy for all layers fits."""
    return refine(search, run_o1(search))


def refine(search: Search, result: SearchResult) -> SearchResult:
    """The result with layer-wise plans that beat its winner, if there are any."""
    found = list(result.feasible)
    settings = sorted(((_least(search, s), i, s) for i, s in enumerate(_settings(search))), key=lambda entry: entry[:2])
    for done, (least, _, setting) in enumerate(settings):
        search.progress(done, len(settings), setting.common)
        below = min(e.estimate.step_time_s if search.bounded else e.analytic_s for e in found)
        if least >= below:
            break
        if search.deadline.passed("settings", left=len(settings) - done, total=len(settings)):
            break
        cut = best_cut(search, setting, below)
        if cut is None:
            continue
        evaluated = _evaluate(search, setting, cut)
        if evaluated.estimate.fits:
            found.append(evaluated)
            search.progress.found(evaluated.estimate.step_time_s, candidate_dict(evaluated.candidate), is_estimated=True)
    feasible = tuple(ranked(found, search.resolution))
    best = feasible[0]
    notes = distinct(search.deadline.stopped, *result.notes)
    completion = search.completion(best.candidate)
    return replace(result, best=best, completion=completion, feasible=feasible, notes=notes)


def _settings(search: Search) -> Iterator[Setting]:
    """Every combination of what layers have in common, with the strategies that fit it."""
    found, _ = ways(search.analysis, search.cluster, search.training, search.space)
    members: dict[tuple[object, ...], list[Candidate]] = {}
    for degrees in found:
        for c in variants(search.analysis, search.cluster, search.training, search.space, degrees):
            if c.vpp == 1 and c.schedule != "VPP":
                zero = (c.sharding_stage, c.sharding_degree)
                common = (c.pp, c.dp * c.micro_batch, c.axes, c.sequence_parallel, c.schedule, *zero, c.ep > 1)
                mesh = (c.dp, c.mp) if search.space.forbids("layer_meshes", "any") else ()
                members.setdefault((*common, *mesh), []).append(c)
    lost: dict[tuple[object, ...], Reason | None] = {}
    for candidates in members.values():
        options = []
        for c in candidates:
            completion = search.completion(c)
            key = (completion.mesh.axes, completion.mesh.shape, completion.mesh.experts)
            if key not in lost:
                lost[key] = search.unusable(c)
            if not lost[key]:
                options.append(option_of(c, LayerStrategy(completion, c.recompute), c.dp * c.micro_batch))
        if options:
            yield Setting(options[0].candidate, tuple(options))


def _least(search: Search, setting: Setting) -> float:
    """No plan of the setting is estimated to take less, whatever its cut and its strategies.

    With t_s and c_s what stage s takes per micro batch and once per step, t that of the device or of the host alone,

        step >= max over s of (sum over i < s of t_i + m t_s) + max over s of c_s  (see ``bounds``)
             >= sum over s of (w_s t_s + c_s / pp)

    where w comes from any weights of the terms of the first maximum (``_mixed``), and every layer adds to the sum at least what
    it does on the stage and with the strategies where that is least."""
    parts = _over_stages(search, setting, LayerCosts.least_parts)
    closing = parts[:, :, CLOSING] / len(parts)
    per_step = (
        _mixed(part.sum(1), setting.candidate.accumulate_steps)[:, None] * part for part in np.moveaxis(parts, 2, 0)[:CLOSING]
    )
    return max(float((seconds + closing).min(0).sum()) for seconds in per_step)


def _mixed(whole: np.ndarray, steps: int) -> np.ndarray:
    """Per stage, how often its time counts in a weighted mean of the terms ``sum over i < s of t_i + m t_s``, where
    ``whole`` is what all layers would take there. The weights make all ``w_s * whole_s`` equal as far as they can, so that no
    cut has much less; on equal stages w_s = 1 / (1 - (1 - 1 / m) ** pp)."""
    weights = np.zeros(len(whole))
    if not whole.all():  # a host that launches in no time bounds nothing
        return weights
    for s in reversed(range(len(whole))):
        weights[s] = max(0.0, 1.0 / whole[s] - weights.sum()) / steps
    later = np.cumsum(weights[::-1])[::-1] - weights
    return (steps * weights + later) / weights.sum()


def _over_stages(search: Search, setting: Setting, least: Callable[[LayerCosts], np.ndarray]) -> np.ndarray:
    """What ``least`` says of every stage, equal stages asked once."""
    stages = range(setting.candidate.pp) if not search.cluster.is_homogeneous else (0,)
    found = np.stack([least(_layer_costs(search, setting, s)) for s in stages])
    return np.broadcast_to(found, (setting.candidate.pp, *found.shape[1:]))


def _layer_costs(search: Search, setting: Setting, stage: int) -> LayerCosts:
    c = setting.candidate
    flying = in_flight(c.schedule, stage, c.pp, c.accumulate_steps)
    return LayerCosts(search.costs, setting.options, stage, c.accumulate_steps, flying)


def best_cut(search: Search, setting: Setting, below: float = np.inf) -> Cut | None:
    """The best cut and strategies of a setting, or None where nothing fits or nothing takes less than ``below`` seconds."""
    c, layers = setting.candidate, search.analysis.layers.count
    costs = _over_stages(search, setting, LayerCosts.least_seconds)
    # Whatever the cut, the longest stage takes at least the mean of all weighted by their speeds. So a run that exceeds its
    # fastest strategies by e makes the sum of stages longer by e, the longest by its stage's share of the speed times e.
    speeds = 1.0 / costs.sum(1)
    more = (c.accumulate_steps - 1) * speeds / speeds.sum()
    least = costs.min(0).sum() + (more[:, None] * costs).min(0).sum()
    if least >= below:
        return None
    slacks = (below - least) / (1 + more)
    stages = [_stage_runs(search, setting, s, slack) for s, slack in enumerate(slacks)]
    most = [min(layers, stage.most_layers()) for stage in stages]
    for stage, fitting in zip(stages, most, strict=True):
        stage.least_layers = max(1, layers - sum(most) + fitting)
        if stage.least_layers > fitting:
            return None
    return cut(stages, layers, c.accumulate_steps, below)


def _stage_runs(search: Search, setting: Setting, stage: int, slack: float = np.inf) -> StageRuns:
    completion = setting.options[0].strategy.completion
    machine = search.costs.table.machines.of(completion.mesh, stage * completion.mesh.size)
    reduces = search.training.mode == "train" and any(o.dp > 1 for o in setting.options)
    bucket = search.costs.table.constants.bucket_bytes if reduces else 0.0
    return StageRuns(_layer_costs(search, setting, stage), machine.memory * (1.0 - search.memory_reserve) - bucket, slack)


@dataclass(frozen=True)
class _Partial:
    """The first stages: sum and maximum of their times."""

    total: float
    longest: float
    stage_layers: tuple[int, ...] = ()
    options: tuple[int, ...] = ()

    def then(self, way: Way) -> _Partial:
        return _Partial(
            self.total + way.seconds,
            max(self.longest, way.seconds),
            (*self.stage_layers, len(way.options)),
            (*self.options, *way.options),
        )

    def seconds(self, steps: int) -> float:
        return self.total + (steps - 1) * self.longest


def cut(stages: Sequence[StageRuns], layers: int, steps: int, below: float = np.inf) -> Cut | None:
    """The dynamic programme over (layers done, stages done)."""
    rest = _rest(stages)
    reached: dict[int, list[_Partial]] = {0: [_Partial(0.0, 0.0)]}
    for s, stage in enumerate(stages):
        following: dict[int, list[_Partial]] = {}
        left = len(stages) - s - 1
        for start, partials in reached.items():
            for end, way in enumerate(stage.ends(start, layers - 1 - left), start):
                if left == 0 and end != layers - 1:
                    continue
                ahead = rest[end + 1]
                for new in (partial.then(way) for partial in partials):
                    longest = max(new.longest, ahead / left if left else 0.0)
                    if new.total + ahead + (steps - 1) * longest < below:
                        following.setdefault(end + 1, []).append(new)
        reached = {done: _best(partials) for done, partials in following.items()}
    complete = reached.get(layers, [])
    if not complete:
        return None
    best = min(complete, key=lambda p: (p.seconds(steps), p.stage_layers, p.options))
    return Cut(best.seconds(steps), best.stage_layers, _tidy(stages, best))


def _tidy(stages: Sequence[StageRuns], best: _Partial) -> tuple[int, ...]:
    """The same strategies with equal ones side by side, where layers and meshes are the same and so nothing is resharded."""
    tidy: list[int] = []
    for stage, count in zip(stages, best.stage_layers, strict=True):
        start = len(tidy)
        run, costs = range(start, start + count), stage.costs
        for _, alike in groupby(run, key=lambda i: (costs.kinds[i], costs.options[best.options[i]].dp)):
            tidy += sorted(best.options[i] for i in alike)
    return tuple(tidy)


def _rest(stages: Sequence[StageRuns]) -> np.ndarray:
    """From each layer on, the least time that the layers take that follow."""
    least = np.minimum.reduce([stage.costs.least_seconds() for stage in stages])
    return np.concatenate((np.cumsum(least[::-1])[::-1], [0.0]))


def _best(partials: list[_Partial]) -> list[_Partial]:
    """Those that no other beats."""
    kept: list[_Partial] = []
    for p in sorted(partials, key=lambda p: (p.total, p.longest, p.stage_layers, p.options)):
        if not kept or p.longest < kept[-1].longest:
            kept.append(p)
    return kept


def _evaluate(search: Search, setting: Setting, found: Cut) -> Evaluated:
    """The exact cost of a cut. The candidate it is reported as has the strategy of most layers."""
    most = max(set(found.options), key=lambda i: (found.options.count(i), -i))
    candidate = setting.options[most].candidate
    return search.evaluate(candidate, found.stage_layers, tuple(setting.options[i].strategy for i in found.options))
