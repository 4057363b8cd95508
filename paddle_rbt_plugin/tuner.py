"""The complete path from a program to a plan.

    program -> graph -> pattern matches and layers -> candidates -> completion -> cost -> plan

Each step is one call below, to a module of the same name. The inputs are a graph and a ``Request``; callers turn a Layer or a
file into a graph, and execute the plan.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from paddle_rbt_plugin.completion import Answers, cache_folder
from paddle_rbt_plugin.completion.forms import CPU_FORMS, forms_on
from paddle_rbt_plugin.cost.model import CostModelAdapter
from paddle_rbt_plugin.errors import PlanError, TunerWarning
from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.notes import note
from paddle_rbt_plugin.plan.build import make_plan
from paddle_rbt_plugin.plan.explain import decision
from paddle_rbt_plugin.plan.files import check_writable
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.plan.remembered import RememberedPlan
from paddle_rbt_plugin.plugins import Plugins, load_plugins
from paddle_rbt_plugin.request import Request
from paddle_rbt_plugin.search import Analysis, Progress, Search, analyse, run_level


def tune_graph(graph: Graph, request: Request) -> Plan:
    """Plans a graph. Raises TunerError for a program that does not fit the request, CostModelError for a cost model that cannot
    be used, PlanError for a plan that cannot be loaded, and NoFeasiblePlan if nothing fits."""
    with collection_paused():
        return _loaded(graph, request) if request.settings.load_path is not None else _searched(graph, request)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Tracing and planning create hardly any cyclic garbage, while a collection visits all objects of the process, which with
    Paddle imported can take as long as planning a small model."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _searched(graph: Graph, request: Request) -> Plan:
    settings = request.settings
    if settings.save_path is not None:
        check_writable(settings.save_path)
    plugins = load_plugins(settings.blocked_plugins)
    folder = cache_folder(settings.cache)
    remembered = RememberedPlan(folder, graph, request, plugins)
    plan = remembered.find()
    if plan is None:
        plan, is_final = _planned(graph, request, plugins, Answers(folder))
        if is_final:
            remembered.keep(plan)
    elif request.progress is not None:
        best = plan.candidates[0]
        request.progress(Progress(1, 1, {}, best, best["step_time_s"], is_estimated=True))
    if settings.save_path is not None:
        plan.save(settings.save_path)
    return plan


def _planned(graph: Graph, request: Request, plugins: Plugins, answers: Answers) -> tuple[Plan, bool]:
    """The plan, and whether planning it again would neither change it nor warn."""
    settings, cluster, space = request.settings, request.cluster, request.space
    cost_model = plugins.cost_model(settings.cost_model)
    patterns = {p.name: p for p in (*plugins.patterns, *request.patterns)}.values()
    forms = forms_on(cluster) if request.rewrite else CPU_FORMS
    analysis = analyse(graph, patterns, rewrite=request.rewrite, op_names=plugins.op_names, forms=forms, answers=answers)
    training = request.training(analysis.batch, analysis.graph.weight_precision)
    matches = analysis.matches
    if not matches.matches:
        _warn_nothing_matched(analysis)
    for constraint in request.constraints:
        space = space.restrict(constraint.reason, **constraint.values)
    judge = CostModelAdapter(cost_model, graph, cluster, training)
    search = Search(analysis, cluster, training, space, settings.memory_reserve, request.progress, settings.time_limit, judge)
    try:
        result = run_level(search, settings.level)
    finally:
        answers.save()
    plan = make_plan(search.standing(result.best.candidate), result, cluster, training, settings.level, cost_model.to_dict())
    return plan, bool(matches.matches) and not (matches.failed or matches.incomplete or search.deadline.stopped)


def _loaded(graph: Graph, request: Request) -> Plan:
    """The saved plan that the settings name. Raises PlanError for a plan of another program, cluster or global batch, and for
    one that the search space rules out. Warns if the plan was made for another precision or if the job's strategy does not
    follow it; the latter is also noted in the plan."""
    path, precision, global_batch = str(request.settings.load_path), request.precision, request.global_batch
    plan = Plan.load(path)
    if global_batch not in (None, plan.global_batch):
        raise PlanError(
            f"the plan {path!r} is for a global batch of {plan.global_batch} (micro batch "
            f"{plan.micro_batch}, accumulate_steps {plan.accumulate_steps}, dp {plan.degrees['dp']}), not of {global_batch}; "
            "plan again for that, or leave global_batch out"
        )
    plan = plan.for_program(graph)
    plan.check_cluster(request.cluster)
    chosen = decision(plan)
    chosen["order"] = "_".join(chosen.pop("axes"))
    without_meaning = {"schedule", "vpp"} if chosen["pp"] == 1 else set()
    without_meaning |= {"order"} if 1 in (chosen["dp"], chosen["mp"]) else set()
    for name in chosen.keys() - without_meaning:
        reason = request.space.forbids(name, chosen[name])
        if reason:
            raise PlanError(f"the plan {path!r} has {name} {chosen[name]}, but {reason}; plan again")
    if precision not in (None, plan.precision):
        warnings.warn(
            f"the plan {path!r} was made for training in {plan.precision}, not in {precision}: times and memory differ",
            TunerWarning,
            stacklevel=5,
        )
    otherwise = [
        f"{name} {chosen[name]} ({constraint.reason} allows {', '.join(map(str, allowed))} only)"
        for constraint in request.constraints
        for name, allowed in constraint.values.items()
        if name in chosen.keys() - without_meaning and chosen[name] not in allowed
    ]
    if otherwise:
        words = str(note("strategy", unmet=otherwise))
        warnings.warn(f"the plan {path!r}: {words}", TunerWarning, stacklevel=5)
        return replace(plan, notes=(*plan.notes, words))
    return plan


def _warn_nothing_matched(analysis: Analysis) -> None:
    ops = sorted({op.type for op in analysis.graph.ops})
    warnings.warn(
        "no pattern matches this model, so the plan is data parallel only, with every parameter whole on every device; "
        f"unmatched ops: {', '.join(ops)}. 'paddle-rbt patterns' lists the available patterns",
        TunerWarning,
        stacklevel=5,
    )
