"""What this package registers besides its patterns: its cost models, by the hook that others use.

Without an entry point, since blocking this package's patterns must leave a cost model to plan with."""

from __future__ import annotations

from collections.abc import Callable

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.cost.candidate import Training
from paddle_rbt_plugin.cost.estimates import RESOLUTION
from paddle_rbt_plugin.cost.model import Case, CostModel, Prediction
from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.plugins.markers import hookimpl


class AnalyticCostModel(CostModel):
    """The roofline and ring model of ``cost.estimates``."""

    name = "analytic"
    bounded = True
    resolution = RESOLUTION

    def estimate(self, case: Case) -> Prediction:
        return Prediction(case.analytic.step_time_s, time=case.analytic.time)


class PaddleCostModel(CostModel):
    """Paddle's CostEstimator. It reads completed legacy programs, not graphs, so ``handover.legacy.judge`` runs it."""

    name = "paddle"

    def __init__(self, graph: Graph, cluster: Cluster, training: Training):
        raise UnsupportedProgram(
            "it is Paddle's CostEstimator, which reads legacy programs only; choose 'analytic', or build the program with "
            "FLAGS_enable_pir_api=0"
        )

    def estimate(self, case: Case) -> Prediction:
        raise NotImplementedError("no instance is made; handover.legacy.judge runs it")


@hookimpl
def register_cost_models(register: Callable[[type[CostModel]], None]) -> None:
    register(AnalyticCostModel)
    register(PaddleCostModel)
