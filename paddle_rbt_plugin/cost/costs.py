"""Costs of the candidates of one search, which remember what candidates have in common."""

from __future__ import annotations

from collections.abc import Sequence

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.completion.work import Completion
from paddle_rbt_plugin.cost.candidate import Candidate, Training
from paddle_rbt_plugin.cost.constants import DEFAULT, Constants
from paddle_rbt_plugin.cost.stage_costs import LayerStrategy, StageCosts, stage_costs
from paddle_rbt_plugin.cost.stages import Cut, make_cut
from paddle_rbt_plugin.cost.step_costs import StageStates, StepCosts
from paddle_rbt_plugin.cost.table import CostTable, Strategy


class CandidateCosts:
    """Costs of candidates on one cluster in one training. Stages that differ in nothing are costed once, for all micro batches
    of a family of candidates at a time."""

    def __init__(self, cluster: Cluster, training: Training, constants: Constants = DEFAULT):
        self.table = CostTable(cluster, training, constants)
        self._stages: dict[tuple[object, ...], dict[tuple[int, ...], StageCosts]] = {}
        self._states: dict[tuple[object, ...], StageStates] = {}

    def on(self, cluster: Cluster) -> CandidateCosts:
        """Costs on another order of the cluster's groups."""
        other = CandidateCosts(cluster, self.table.training)
        other.table = self.table.on(cluster)
        return other

    def family(
        self, completion: Completion, candidate: Candidate, micro_batches: tuple[int, ...], steps: Sequence[int]
    ) -> StepCosts:
        """Steps of the candidate and of others that have other micro batches, and so other numbers of them in a step; stages
        are as even as the layers allow."""
        cut = make_cut(completion.layers.count, candidate.pp, candidate.vpp if candidate.pp > 1 else 1)
        return self._steps(completion, candidate, cut, micro_batches, steps)

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
            return self._steps(completion, candidate, cut, micro_batch, steps)
        strategy = Strategy(candidate.recompute, candidate.sequence_parallel)
        stages = stage_costs(self.table, completion, cut, strategy, micro_batch, layers)
        states = StageStates(stages, candidate, self.table)
        return StepCosts(stages, states, candidate, steps, self.table.training)

    def _steps(
        self, completion: Completion, candidate: Candidate, cut: Cut, micro_batches: tuple[int, ...], steps: Sequence[int]
    ) -> StepCosts:
        mesh, strategy = completion.mesh, Strategy(candidate.recompute, candidate.sequence_parallel)
        where = (completion.work, completion.crossings, mesh.axes, mesh.shape, cut)
        known = self._stages.setdefault((*where, strategy), {})
        if micro_batches not in known:
            known[micro_batches] = stage_costs(self.table, completion, cut, strategy, micro_batches)
            known |= {(m,): known[micro_batches].only(i) for i, m in enumerate(micro_batches) if (m,) not in known}
        stages = known[micro_batches]
        split = (*where, candidate.sharding_stage, candidate.sharding_degree)
        if split not in self._states:
            self._states[split] = StageStates(stages, candidate, self.table)
        return StepCosts(stages, self._states[split], candidate, steps, self.table.training)
