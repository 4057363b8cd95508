"""Level o2: every layer has its own strategy, and stages are cut where it is best.

    minimise   T = sum_s t_s + (m - 1) max_s t_s
    over       cuts of the layers into pp runs, and a strategy for each layer of each run
    with       memory of every run <= device memory less reserve

T is the makespan of FThenB and 1F1B with m micro batches and equal stages; t and the memory of a run are defined in ``runs``.
For each way to divide devices and batch (``_settings``) the dynamic programme ``cut`` goes over (layers done, stages done) and
keeps every (sum t, max t) that no other beats, so the best of all cuts and strategies is found; ``tests/test_search_o2.py``
compares it with trying everything. Left out is only what cannot beat what is already found: settings by ``_least``, runs by
what they exceed their fastest strategies by.

The winner of each setting is then estimated as any other candidate, pipeline simulated, and the best estimate wins. The winner
of level o1 takes part, so level o2 is never worse. The interleaved schedule, whose chunks Paddle cuts evenly, comes from o1.
Under a cost model without bounds, settings and cuts are those that the analytic model finds; which of them wins is that one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from paddle_rbt_plugin.cost.candidate import Candidate
from paddle_rbt_plugin.cost.pipeline import in_flight
from paddle_rbt_plugin.cost.stage_cost import LayerStrategy
from paddle_rbt_plugin.search.o1 import Search, run_o1
from paddle_rbt_plugin.search.result import Evaluated, SearchResult
from paddle_rbt_plugin.search.runs import Option, StageRuns, Way, option_of
from paddle_rbt_plugin.search.space import candidate_dict, variants, ways

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
    best, found = result.best, list(result.feasible)
    settings = sorted(((_least(search, s), i, s) for i, s in enumerate(_settings(search))), key=lambda entry: entry[:2])
    for done, (least, _, setting) in enumerate(settings):
        search.progress(done, len(settings), setting.common)
        below = best.estimate.step_time_s if search.bounded else min(e.analytic_s for e in found)
        if least >= below:
            break
        if search.deadline.passed(f"{len(settings) - done} of {len(settings)} settings of level o2 are not tried"):
            break
        cut = best_cut(search, setting, below)
        if cut is None:
            continue
        evaluated = _evaluate(search, setting, cut)
        if evaluated.estimate.fits:
            found.append(evaluated)
            search.progress.found(evaluated.estimate.step_time_s, candidate_dict(evaluated.candidate), is_estimated=True)
            best = min(best, evaluated, key=lambda e: e.rank)
    search.progress(len(settings), len(settings))
    notes = tuple(dict.fromkeys(filter(None, (search.deadline.stopped, *result.notes))))
    ranked = tuple(sorted(found, key=lambda e: e.rank))
    completion = search.completion(best.candidate)
    return replace(result, best=best, completion=completion, feasible=ranked, notes=notes)


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
    lost: dict[tuple[object, ...], str] = {}
    for candidates in members.values():
        options = []
        for c in candidates:
            completion = search.completion(c)
            key = (completion.mesh.axes, completion.mesh.shape, completion.mesh.experts)
            if key not in lost:
                lost[key] = search.analysis.lost_sharding(completion)
            if not lost[key]:
                options.append(option_of(c, LayerStrategy(completion, c.recompute), c.dp * c.micro_batch))
        if options:
            yield Setting(options[0].candidate, tuple(options))


def _least(search: Search, setting: Setting) -> float:
    """Less than any plan of the setting takes, memory aside."""
    steps = setting.candidate.accumulate_steps
    costs, shares = _fastest(search, setting)
    return float(costs.min(0).sum() + (steps - 1) * (shares[:, None] * costs).min(0).sum())


def _fastest(search: Search, setting: Setting) -> tuple[np.ndarray, np.ndarray]:
    """Per stage and layer the least time under any strategy, and per stage its share of the speed of all.

    Whatever the cut, the longest stage takes at least the mean of all with these shares as weights, and so at least the sum
    over layers of the least share * time; on equal stages that is an equal part of all layers."""
    stages = range(setting.candidate.pp) if not search.cluster.is_homogeneous else (0,)
    costs = np.stack([_stage_runs(search, setting, s).least_seconds() for s in stages])
    costs = np.broadcast_to(costs, (setting.candidate.pp, costs.shape[1]))
    speeds = 1.0 / costs.sum(1)
    return costs, speeds / speeds.sum()


def best_cut(search: Search, setting: Setting, below: float = np.inf) -> Cut | None:
    """The best cut and strategies of a setting, or None where nothing fits or nothing takes less than ``below`` seconds."""
    c, layers = setting.candidate, search.analysis.layers.count
    # A run that exceeds its fastest strategies by e makes the sum of stages longer by e, the longest by its share of e.
    room = below - _least(search, setting)
    slacks = room / (1 + (c.accumulate_steps - 1) * _fastest(search, setting)[1])
    stages = [_stage_runs(search, setting, s, slack) for s, slack in enumerate(slacks)]
    most = [min(layers, stage.most_layers()) for stage in stages]
    for stage in stages:
        stage.least_layers = max(1, layers - sum(most) + most[stage.stage])
        if stage.least_layers > most[stage.stage]:
            return None
    return cut(stages, layers, c.accumulate_steps, below)


def _stage_runs(search: Search, setting: Setting, stage: int, slack: float = np.inf) -> StageRuns:
    c, constants = setting.candidate, search.shared.constants
    completion = setting.options[0].strategy.completion
    device, _ = search.shared.machine(completion.mesh, stage * completion.mesh.size)
    reduces = search.training.mode == "train" and any(o.dp > 1 for o in setting.options)
    limit = device.memory * (1.0 - search.memory_reserve) - (constants.bucket_bytes if reduces else 0.0)
    flying = in_flight(c.schedule, stage, c.pp, c.accumulate_steps)
    return StageRuns(search.bounds, setting.options, stage, c.accumulate_steps, flying, limit, slack)


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
        run = range(start, start + count)
        for _, alike in groupby(run, key=lambda i: (stage.kinds[i], stage.options[best.options[i]].dp)):
            tidy += sorted(best.options[i] for i in alike)
    return tuple(tidy)


def _rest(stages: Sequence[StageRuns]) -> np.ndarray:
    """From each layer on, the least time that the layers take that follow."""
    least = np.minimum.reduce([stage.least_seconds() for stage in stages])
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
