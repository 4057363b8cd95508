"""Plans judged by Paddle's own CostEstimator, on the program as Paddle completes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import paddle

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.cost.paddle import PaddleEstimate, paddle_estimate
from paddle_rbt_plugin.graph.legacy import LegacyGraph
from paddle_rbt_plugin.handover.legacy.ops import legacy_static_ops
from paddle_rbt_plugin.handover.legacy.partition import LegacyParallelizer
from paddle_rbt_plugin.notes import Note, note
from paddle_rbt_plugin.plan.files import check_writable
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.request import Constraint, Request
from paddle_rbt_plugin.tuner import tune_graph

_CHOICE = ("pp", "dp", "mp", "micro_batch", "accumulate_steps", "recompute", "sharding_stage", "schedule", "vpp")


def judge(main: Any, startup: Any, loss: Any, optimizer: Any, legacy: LegacyGraph, plan: Plan) -> PaddleEstimate:
    """What Paddle's CostEstimator says of one step of the program under a plan, optimizer states included."""
    chain = LegacyParallelizer(main, startup, loss, optimizer, legacy, plan)
    context = chain.context
    program = context.serial_main_program
    with paddle.static.program_guard(program, context.serial_startup_program), legacy_static_ops():
        context.serial_optimizer.apply_gradients(chain.parameters_and_gradients)
    chain.completer.complete_update_annotation(program)
    return paddle_estimate(program, context, Cluster.from_dict(plan.cluster))


def tune_legacy(main: Any, legacy: LegacyGraph, request: Request) -> Plan:
    """Plans a legacy program by the cost model that the settings of the request name."""
    lacking = Constraint("the legacy IR", {"ep": (1,), "schedule": ("1F1B", "FThenB"), "vpp": (1,)})
    request = replace(request, constraints=(*request.constraints, lacking), rewrite=False)
    if request.settings.cost_model == "paddle" and request.settings.load_path is None:
        return _tune_by_paddle(main, legacy, request)
    return tune_graph(legacy.graph, request)


def _tune_by_paddle(main: Any, legacy: LegacyGraph, request: Request) -> Plan:
    """The plan that Paddle's CostEstimator likes best among the best of every factorisation of the devices.

        minimise  (time by Paddle's estimator, time by the analytic model)  in this order

    Which factorisation is fastest is Paddle's word. How each is best run, and whether it fits, is the analytic model's, for
    to Paddle's all of these are equal: it knows neither ZeRO, recomputation nor accumulation. So no plan that Paddle's own
    tuner may make is better by its model, and none of the same degrees by ours. Both figures are in the notes of the plan."""
    settings = request.settings
    if settings.save_path is not None:
        check_writable(settings.save_path)
    analytic = replace(request, settings=replace(settings, cost_model="analytic", save_path=None))
    found = tune_graph(legacy.graph, analytic)
    judged: list[tuple[PaddleEstimate, Plan]] = []
    figures: list[Note] = []
    for candidate in _best_of_each(found):
        fixed = Constraint("cost_model 'paddle'", {key: (candidate[key],) for key in _CHOICE})
        plan = tune_graph(legacy.graph, replace(analytic, constraints=(*analytic.constraints, fixed)))
        loss = main.global_block().vars[legacy.variables[_loss(legacy)]]
        estimate = judge(main.clone(), paddle.static.Program(), loss, paddle.optimizer.AdamW(1e-3), legacy, plan)
        judged.append((estimate, plan))
        figures.append(_comparison(plan, estimate))
    best = min(judged, key=lambda pair: (pair[0].step_time_s, pair[1].estimate.step_time_s))[1]
    source = load_plugins(settings.blocked_plugins).cost_model(settings.cost_model).to_dict()
    notes = (*best.notes, *map(str, figures))
    best = replace(best, candidates=found.candidates, rejected=found.rejected, notes=notes, cost_model=source)
    if settings.save_path is not None:
        best.save(settings.save_path)
    return best


def _comparison(plan: Plan, estimate: PaddleEstimate) -> Note:
    theirs, ours = ((e.step_time_s, e.peak_memory_bytes) for e in (estimate, plan.estimate))
    return note("paddle_estimate", degrees=plan.degrees, theirs=theirs, ours=ours)


def _loss(legacy: LegacyGraph) -> int:
    assert legacy.graph.loss is not None  # the reader has made sure
    return legacy.graph.loss


def _best_of_each(plan: Plan) -> list[dict[str, Any]]:
    """The first of the plan's candidates, which are best first, of every (pp, dp, mp)."""
    best: dict[tuple[int, ...], dict[str, Any]] = {}
    for candidate in plan.candidates:
        best.setdefault((candidate["pp"], candidate["dp"], candidate["mp"]), dict(candidate))
    return list(best.values())
