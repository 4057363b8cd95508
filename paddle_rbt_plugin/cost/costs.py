"""Costs of the candidates of one search, which remember what candidates have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.completion.work import Completion
from paddle_rbt_plugin.cost.candidate import Candidate, Training
from paddle_rbt_plugin.cost.constants import DEFAULT, Constants
from paddle_rbt_plugin.cost.stage_costs import LayerStrategy, StageCosts, stage_costs
from paddle_rbt_plugin.cost.stages import Cut, make_cut
from paddle_rbt_plugin.cost.step_costs import PipelineCosts, StageStates, StepCosts
from paddle_rbt_plugin.cost.table import CostTable, Strategy


class CandidateCosts:
    """Costs of candidates on one cluster in one training. Stages that differ in nothing are costed once, for all micro batches
    of a family of candidates at a time."""

    def __init__(self, cluster: Cluster, training: Training, constants: Constants = DEFAULT):
        self.table = CostTable(cluster, training, constants)
        self._stages: dict[tuple[object, ...], dict[tuple[int, ...], StageCosts]] = {}
        self._pipelines: dict[tuple[object, ...], PipelineCosts] = {}
        self._states: dict[tuple[object, ...], StageStates] = {}

    def on(self, cluster: Cluster) -> CandidateCosts:
        """Costs on another order of the cluster's groups."""
        other = CandidateCosts(cluster, self.table.training)
        other.table = self.table.on(cluster)
        return other

    def family(
        self, completion: Completion, candidate: Candidate, micro_batches: tuple[int, ...], steps: tuple[int, ...]
    ) -> StepCosts:
        """Steps of the candidate and of others that have other micro batches, and so other numbers of them in a step; stages
        are as even as the layers allow."""
        cut = make_cut(completion.layers.count, candidate.pp, candidate.vpp if candidate.pp > 1 else 1)
        return self._family(completion, candidate, cut, micro_batches, steps)

    def one(
        self,
        completion: Completion,
        candidate: Candidate,
        stage_layers: Sequence[int] | None = None,
        layers: Sequence[LayerStrategy] | None = None,
    ) -> StepCosts:
        """The step of one candidate. ``stage_layers`` and ``layers`` are as in ``estimate``."""
        pp, chunks, count = candidate.pp, candidate.vpp if candidate.pp > 1 else 1, completion.layers.count
        cut = make_cut(count, pp, chunks, stage_layers)
        micro_batch, steps = (candidate.micro_batch,), (candidate.accumulate_steps,)
        if layers is None:
            return self._family(completion, candidate, cut, micro_batch, steps)
        strategy = Strategy(candidate.recompute, candidate.sequence_parallel)
        stages = stage_costs(self.table, completion, cut, strategy, micro_batch, layers)
        pipeline = PipelineCosts(stages, candidate.schedule, steps, self.table.training)
        return StepCosts(pipeline, StageStates(stages, candidate, self.table))

    def _family(
        self, completion: Completion, candidate: Candidate, cut: Cut, micro_batches: tuple[int, ...], steps: tuple[int, ...]
    ) -> StepCosts:
        mesh = completion.mesh
        where = (completion.work, completion.crossings, mesh.axes, mesh.shape, cut)
        strategy = Strategy(candidate.recompute, candidate.sequence_parallel)
        key = (*where, strategy, micro_batches, candidate.schedule, steps)
        if key not in self._pipelines:
            stages = self._stages_of((*where, strategy), completion, micro_batches)
            self._pipelines[key] = PipelineCosts(stages, candidate.schedule, steps, self.table.training)
        pipeline = self._pipelines[key]
        split = (*where, candidate.sharding_stage, candidate.sharding_degree)
        if split not in self._states:
            self._states[split] = StageStates(pipeline.stages, candidate, self.table)
        return StepCosts(pipeline, self._states[split])

    def _stages_of(self, key: tuple[Any, ...], completion: Completion, micro_batches: tuple[int, ...]) -> StageCosts:
        *_, cut, strategy = key
        known = self._stages.setdefault(key, {})
        if micro_batches not in known:
            several = next((some for some in known if len(micro_batches) == 1 and micro_batches[0] in some), None)
            if several is None:
                known[micro_batches] = stage_costs(self.table, completion, cut, strategy, micro_batches)
            else:
                known[micro_batches] = known[several].only(several.index(micro_batches[0]))
        return known[micro_batches]
