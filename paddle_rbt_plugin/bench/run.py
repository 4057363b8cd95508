"""Runs a case: our plan, the published strategies and that of Paddle's own tuner, under one cost model.

All are planned by ``tune_graph``, as by every other command. For a strategy to compare with, the search space is what its
source states; what that leaves open (a micro batch, say) is chosen in its favour.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from paddle_rbt_plugin.bench.case import Case
from paddle_rbt_plugin.bench.results import Result, Row
from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.errors import NoFeasiblePlan
from paddle_rbt_plugin.model_reference import model_graph
from paddle_rbt_plugin.plan.explain import decision
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.plugins import parse_cluster
from paddle_rbt_plugin.request import Request, best_precision
from paddle_rbt_plugin.search import Watcher
from paddle_rbt_plugin.tuner import collection_paused, tune_graph


class Bench:
    """A case with its model traced. Raises TunerError where the case names something that does not exist."""

    def __init__(self, case: Case, progress: Watcher | None = None):
        started = time.process_time()
        self.case = case
        self.cluster = parse_cluster(case.cluster)
        self.precision = case.precision or best_precision(self.cluster)
        with collection_paused():
            self.graph = model_graph(case.model, case.global_batch, case.seq)
        self._progress = progress
        self._tracing_s = time.process_time() - started

    def run(self) -> Result:
        """Plans the case and judges the published strategies. Raises NoFeasiblePlan where no plan of ours fits."""
        started = time.process_time()
        plan = self._plan(self.case.search_space, self.case.level)
        ours = self._row("ours", plan, tuning_s=self._tracing_s + time.process_time() - started)
        published = [
            self.judge("published", e.strategy, source=e.source, measured_step_time_s=e.measured_step_time_s)
            for e in self.case.experts
        ]
        return Result(
            self.case.name,
            self.case.model,
            str(self.cluster),
            self.cluster.device_count,
            self.case.global_batch,
            self.precision,
            (ours, *published),
        )

    def judge(self, kind: str, strategy: Mapping[str, Any], **known: Any) -> Row:
        """The best plan that agrees with a strategy, or why there is none; ``known`` are other fields of the row."""
        try:
            return self._row(kind, self._plan(strategy, "o1"), **known)
        except NoFeasiblePlan as error:
            return Row(kind, reason=str(error), **known)

    def _plan(self, space: Mapping[str, Any], level: str) -> Plan:
        return tune_graph(
            self.graph,
            Request(
                Settings(cluster=self.cluster, level=level, search_space=dict(space)),
                precision=self.precision,
                global_batch=self.case.global_batch,
                progress=self._progress,
                assumed=tuple(self.case.training),
            ),
        )

    def _row(self, kind: str, plan: Plan, **known: Any) -> Row:
        groups, estimate = self.cluster.groups, plan.estimate
        peak = sum(g.device_count * g.device.flops(self.precision) for g in groups) / self.cluster.device_count
        return Row(
            kind,
            candidate=decision(plan),
            step_time_s=estimate.step_time_s,
            peak_memory_bytes=estimate.peak_memory_bytes,
            tflops_per_gpu=estimate.tflops_per_gpu,
            mfu=estimate.tflops_per_gpu * 1e12 / peak,
            **known,
        )
