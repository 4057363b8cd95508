"""The whole way from a program to a plan.

    program -> graph -> pattern matches and layers -> candidates -> completion -> cost -> plan

Each step is one call below; the modules they come from bear their names.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from paddle_rbt_plugin.cluster import Cluster, check_job
from paddle_rbt_plugin.completion import Answers, cache_folder
from paddle_rbt_plugin.completion.forms import CPU_FORMS, forms_on
from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.cost.candidate import Training
from paddle_rbt_plugin.cost.model import CostModelAdapter
from paddle_rbt_plugin.errors import PlanError, TunerError, TunerWarning, UnsupportedProgram
from paddle_rbt_plugin.graph import Graph, is_legacy, read_program
from paddle_rbt_plugin.graph.legacy import read_legacy_program
from paddle_rbt_plugin.pattern import CompiledPattern
from paddle_rbt_plugin.plan.build import make_plan
from paddle_rbt_plugin.plan.explain import decision
from paddle_rbt_plugin.plan.files import check_writable
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.plugins import detect_cluster, load_plugins, parse_cluster
from paddle_rbt_plugin.search import Analysis, Search, SearchSpace, Watcher, analyse, run_level

PRECISIONS = ("fp32", "fp16", "bf16")

MAX_GLOBAL_BATCH = 2**24
"""Samples of one step: thousands of times what anybody trains with, and few enough to factorise."""


@dataclass(frozen=True)
class Constraint:
    """Values that something other than the search space fixes, and what that is."""

    reason: str
    values: dict[str, tuple]


def tune(
    program: Any,
    *,
    input_spec: Sequence[Any] | None = None,
    labels_spec: Sequence[Any] = (),
    loss: Any = None,
    global_batch: int | None = None,
    precision: str | None = None,
    progress: Watcher | None = None,
    **settings: Any,
) -> Plan:
    """Finds a parallel strategy.

    ``program`` is a static Program (the serial forward pass with its loss) or a Layer. A Layer, which may be built under
    ``LazyGuard``, is traced on ``input_spec``; with ``loss=None`` its forward returns the loss, else ``loss(output,
    *labels)`` does, with the labels of ``labels_spec``. ``global_batch`` is the number of samples of one optimizer step, by
    default the batch of the program. ``precision`` is that of training: ``fp32``, the default, ``fp16`` or ``bf16``. Everything
    else is a field of ``strategy.tuning``: level, cluster, cost_model, search_space, memory_reserve, save_path, load_path,
    blocked_plugins, time_limit, cache. ``progress`` is called with a ``search.Progress`` as the search goes on.

    Raises TunerError for wrong input, ClusterError, UnsupportedProgram, and NoFeasiblePlan where nothing fits.
    """
    chosen = Settings.from_mapping(settings)
    check_batch(global_batch)
    if is_legacy(program):
        from paddle_rbt_plugin.handover.legacy.judge import tune_legacy

        legacy = read_legacy_program(program, loss)
        return tune_legacy(program, legacy, chosen, precision=precision, global_batch=global_batch, progress=progress)
    with _collection_paused():
        graph = _graph(program, input_spec, labels_spec, loss, global_batch)
        return tune_graph(graph, chosen, precision=precision, global_batch=global_batch, progress=progress)


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Tuning makes no cyclic garbage to speak of, and a collection walks all objects of the process, which with Paddle
    imported can take as long as planning a small model."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def tune_graph(
    graph: Graph,
    settings: Settings,
    *,
    precision: str | None = None,
    global_batch: int | None = None,
    constraints: Sequence[Constraint] = (),
    progress: Watcher | None = None,
    notes: Sequence[str] = (),
    rewrite: bool = True,
    assumed: Sequence[str] = (),
    patterns: Sequence[CompiledPattern] = (),
) -> Plan:
    """Plans a graph; see ``tune``. ``constraints`` narrow the search space, each with who asks for it. ``assumed`` are flags of
    ``Training`` that hold although the program does not show them. ``rewrite`` as in ``analyse``: for a program that is handed
    over to PIR. ``patterns`` are used beside the installed ones. Raises CostModelError for a cost model that cannot be used."""
    check_batch(global_batch)
    if precision is not None and precision not in PRECISIONS:
        raise TunerError(f"precision is {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}, not {precision!r}")
    cluster = cluster_of(settings)
    space = SearchSpace.parse(settings.search_space)
    if settings.load_path is not None:
        return _loaded(settings, graph, cluster, space, constraints, precision, global_batch)
    if settings.save_path is not None:
        check_writable(settings.save_path)
    plugins = load_plugins(settings.blocked_plugins)
    cost_model = plugins.cost_model(settings.cost_model)
    every = {p.name: p for p in (*plugins.patterns, *patterns)}.values()
    forms = forms_on(cluster) if rewrite else CPU_FORMS
    answers = Answers(cache_folder(settings.cache))
    analysis = analyse(graph, every, rewrite=rewrite, op_names=plugins.op_names, forms=forms, answers=answers)
    if global_batch is not None and global_batch % analysis.batch:
        raise TunerError(f"global_batch {global_batch} is no multiple of the batch of the program, {analysis.batch}")
    if not analysis.matches.matches:
        _warn_nothing_matched(analysis)
    for constraint in constraints:
        space = space.restrict(constraint.reason, **constraint.values)
    flags = dict.fromkeys(assumed, True)
    training = Training(global_batch or analysis.batch, precision or "fp32", **flags)  # type: ignore[arg-type]
    judge = CostModelAdapter(cost_model, graph, cluster, training)
    search = Search(analysis, cluster, training, space, settings.memory_reserve, progress, settings.time_limit, judge)
    try:
        result = run_level(search, settings.level)
    finally:
        answers.save()
    plan = make_plan(analysis, result, cluster, training, settings.level, notes, cost_model.to_dict())
    if settings.save_path is not None:
        plan.save(settings.save_path)
    return plan


def _loaded(
    settings: Settings,
    graph: Graph,
    cluster: Cluster,
    space: SearchSpace,
    constraints: Sequence[Constraint],
    precision: str | None,
    global_batch: int | None,
) -> Plan:
    """The saved plan that the settings name. Raises PlanError for one of another program, cluster or global batch, and for one
    that the search space rules out; warns of a precision that it was not made for, and, also in the plan, of what the job's
    strategy does otherwise."""
    plan = Plan.load(str(settings.load_path))
    if global_batch not in (None, plan.global_batch):
        raise PlanError(
            f"the plan {str(settings.load_path)!r} is for a global batch of {plan.global_batch} (micro batch "
            f"{plan.micro_batch}, accumulate_steps {plan.accumulate_steps}, dp {plan.degrees['dp']}), not of {global_batch}; "
            "plan again for that, or leave global_batch out"
        )
    plan = plan.for_program(graph)
    plan.check_cluster(cluster)
    chosen = decision(plan)
    chosen["order"] = "_".join(chosen.pop("axes"))
    without_meaning = {"schedule", "vpp"} if chosen["pp"] == 1 else set()
    without_meaning |= {"order"} if 1 in (chosen["dp"], chosen["mp"]) else set()
    for name in chosen.keys() - without_meaning:
        reason = space.forbids(name, chosen[name])
        if reason:
            raise PlanError(f"the plan {str(settings.load_path)!r} has {name} {chosen[name]}, but {reason}; plan again")
    if precision not in (None, plan.precision):
        warnings.warn(
            f"the plan {str(settings.load_path)!r} was made for training in {plan.precision}, not in {precision}: times and "
            "memory differ",
            TunerWarning,
            stacklevel=4,
        )
    otherwise = [
        f"{name} {chosen[name]} ({constraint.reason} allows {', '.join(map(str, allowed))} only)"
        for constraint in constraints
        for name, allowed in constraint.values.items()
        if name in chosen.keys() - without_meaning and chosen[name] not in allowed
    ]
    if otherwise:
        note = f"not applied: {'; '.join(otherwise)}; a strategy made by plan.to_strategy() has the settings of the plan"
        warnings.warn(f"the plan {str(settings.load_path)!r}: {note}", TunerWarning, stacklevel=4)
        return replace(plan, notes=(*plan.notes, note))
    return plan


def check_batch(global_batch: Any) -> None:
    """Raises TunerError for what is no number of samples; None leaves it to the program."""
    whole = isinstance(global_batch, int) and not isinstance(global_batch, bool)
    if global_batch is not None and not (whole and 1 <= global_batch <= MAX_GLOBAL_BATCH):
        raise TunerError(f"global_batch is a number of samples from 1 to {MAX_GLOBAL_BATCH}, not {global_batch!r}")


def _graph(program: Any, input_spec: Any, labels_spec: Sequence[Any], loss: Any, global_batch: int | None) -> Graph:
    from paddle import nn

    if isinstance(program, nn.Layer):
        from paddle_rbt_plugin.handover.pir.trace import trace_layer, with_batch

        if not input_spec or not isinstance(input_spec, (list, tuple)):
            raise TunerError("a Layer is planned on inputs of known shape: give input_spec=[paddle.static.InputSpec(...), ...]")
        specs, labels, batch = with_batch(input_spec, labels_spec, global_batch)
        return trace_layer(program, specs, loss, labels, batch).graph
    if not hasattr(program, "global_block"):
        raise UnsupportedProgram(f"a static Program or a paddle.nn.Layer can be planned, not {type(program).__name__}")
    return read_program(program, loss)


def _warn_nothing_matched(analysis: Analysis) -> None:
    ops = sorted({op.type for op in analysis.graph.ops})
    warnings.warn(
        "no pattern matches this model, so it is planned as data parallel only, every parameter whole on every device; "
        f"unmatched ops: {', '.join(ops)}. 'paddle-rbt patterns' lists the patterns there are",
        TunerWarning,
        stacklevel=4,
    )


def cluster_of(settings: Settings) -> Cluster:
    """The cluster that the settings describe, or the devices of the running job where they describe none."""
    if settings.cluster is None:
        return detect_cluster(settings.blocked_plugins)
    return parse_cluster(settings.cluster, settings.blocked_plugins)


def job_cluster(settings: Settings, world_size: int) -> Cluster:
    """The cluster of the running job. Raises ClusterError when the one described has another number of devices."""
    cluster = cluster_of(settings)
    check_job(cluster, world_size)
    return cluster
