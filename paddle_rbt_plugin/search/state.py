"""The state of one search: its inputs, its deadline, and the costs that its levels share."""

from __future__ import annotations

import time

from paddle_rbt_plugin.cluster import Cluster, ProcessMesh, stage_meshes
from paddle_rbt_plugin.completion import Completion
from paddle_rbt_plugin.cost.candidate import Candidate, Training
from paddle_rbt_plugin.cost.costs import CandidateCosts
from paddle_rbt_plugin.cost.estimates import RESOLUTION, estimate
from paddle_rbt_plugin.cost.model import Case, CostModelAdapter
from paddle_rbt_plugin.cost.stage_costs import LayerStrategy
from paddle_rbt_plugin.cost.stages import make_cut
from paddle_rbt_plugin.notes import Note, note
from paddle_rbt_plugin.search.analysis import Analysis
from paddle_rbt_plugin.search.bounds import Bound, FamilyBounds
from paddle_rbt_plugin.search.dimensions import SearchSpace
from paddle_rbt_plugin.search.progress import Reporter, Watcher
from paddle_rbt_plugin.search.rejections import Reason
from paddle_rbt_plugin.search.result import Evaluated
from paddle_rbt_plugin.search.space import Family


class Deadline:
    """When to stop: ``limit`` seconds from now, never for None."""

    def __init__(self, limit: float | None = None):
        self._limit = limit
        self._end = None if limit is None else time.monotonic() + limit
        self.stopped: Note | None = None
        """Says that the search was stopped; None while it was not."""

    def passed(self, undone: str, **figures: int) -> bool:
        """Whether it is time to stop; ``undone`` and ``figures`` say what is left to do, as in a note of kind ``stopped``."""
        if self._end is None or time.monotonic() < self._end:
            return False
        self.stopped = self.stopped or note("stopped", limit_s=self._limit, undone=undone, **figures)
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
        judge: CostModelAdapter | None = None,
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
        self.costs = CandidateCosts(cluster, training)
        self._layers = analysis.layers.count
        self._completions: dict[tuple[object, ...], Completion] = {}

    def on(self, cluster: Cluster) -> Search:
        """The same search on another cluster, under the same deadline."""
        judge = None if self.judge is None else self.judge.on(cluster)
        other = Search(self.analysis, cluster, self.training, self.space, self.memory_reserve, judge=judge)
        other.deadline = self.deadline
        other.progress = self.progress
        other.costs = self.costs.on(cluster)
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
        pp, chunks = candidate.pp, 1 if self.training.own_copies else candidate.vpp
        key = (pp, chunks, candidate.dp, candidate.mp, candidate.axes, candidate.ep)
        if key not in self._completions:
            cut = () if pp == 1 or self.training.own_copies else make_cut(self._layers, pp, chunks).stage_of_layer
            self._completions[key] = self.standing(candidate).complete(self._mesh(candidate), cut)
        return self._completions[key]

    def standing(self, candidate: Candidate) -> Analysis:
        """The analysis with the matches that stand under the degrees of a candidate."""
        return self.analysis.on(self._mesh(candidate), {"dp": candidate.dp, "mp": candidate.mp, "ep": candidate.ep})

    def _mesh(self, candidate: Candidate) -> ProcessMesh:
        """The mesh of the first stage."""
        return stage_meshes(self.cluster, candidate.pp, candidate.dp, candidate.mp, candidate.axes, candidate.ep)[0]

    def unusable(self, candidate: Candidate) -> Reason | None:
        """Why the degrees of a candidate cannot be used, which only completion shows."""
        analysis, degrees = self.standing(candidate), {"mp": candidate.mp, "ep": candidate.ep}
        return analysis.without_axis(degrees, degrees) or analysis.lost_sharding(self.completion(candidate))

    def bounds(self, family: Family) -> FamilyBounds:
        """The bounds of a family's members."""
        completion = self.completion(family.candidate)
        costs = self.costs.family(completion, family.candidate, family.micro_batches, family.steps)
        return FamilyBounds(family, costs, self.memory_reserve)

    def bound(self, candidate: Candidate) -> Bound:
        """The bounds of one candidate."""
        return self.bounds(Family(candidate, (candidate.micro_batch,), (candidate.accumulate_steps,))).of(0)

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
            costs=self.costs,
        )
        predicted = analytic
        if self.judge is not None:
            predicted = self.judge.estimate(Case(candidate, completion, analytic, stage_layers, layers))
        return Evaluated(candidate, predicted, stage_layers, layers, analytic.step_time_s)
