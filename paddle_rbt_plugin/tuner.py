"""The whole way from a program to a plan.

    program -> graph -> pattern matches and layers -> candidates -> completion -> cost -> plan

Each step is one call below; the modules they come from bear their names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paddle_rbt_plugin.cluster import Cluster, detect_cluster, parse_cluster
from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.cost.candidate import Training
from paddle_rbt_plugin.errors import TunerError, UnsupportedProgram
from paddle_rbt_plugin.graph import Graph, is_legacy, read_program
from paddle_rbt_plugin.graph.legacy import read_legacy_program
from paddle_rbt_plugin.plan.build import make_plan
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import Analysis, Search, SearchSpace, analyse, run_level

MAX_GLOBAL_BATCH = 2**24
"""Samples of one step: thousands of times what anybody trains with, and few enough to factorise."""


@dataclass(frozen=True)
class Constraint:
    """Values that something other than the search space fixes, and what that is."""

    reason: str
    values: dict[str, tuple]


class TunerWarning(UserWarning):
    """Something the user should know although tuning goes on."""


def tune(
    program: Any,
    *,
    input_spec: Sequence[Any] | None = None,
    labels_spec: Sequence[Any] = (),
    loss: Any = None,
    global_batch: int | None = None,
    precision: str = "fp32",
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> Plan:
    """Finds a parallel strategy.

    ``program`` is a static Program (the serial forward pass with its loss) or a Layer. A Layer, which may be built under
    ``LazyGuard``, is traced on ``input_spec``; with ``loss=None`` its forward returns the loss, else ``loss(output,
    *labels)`` does, with the labels of ``labels_spec``. ``global_batch`` is the number of samples of one optimizer step, by
    default the batch of the program. ``precision`` (``fp32``, ``fp16``, ``bf16``) is that of training. Everything else is a
    field of ``strategy.tuning``: level, cluster, cost_model, search_space, memory_reserve, save_path, load_path,
    blocked_plugins, time_limit.

    Raises TunerError for wrong input, ClusterError, UnsupportedProgram, and NoFeasiblePlan where nothing fits.
    """
    chosen = Settings.from_mapping(settings)
    _check_batch(global_batch)
    if precision not in ("fp32", "fp16", "bf16"):
        raise TunerError(f"precision is fp32, fp16 or bf16, not {precision!r}")
    if is_legacy(program):
        from paddle_rbt_plugin.handover.legacy.judge import tune_legacy

        legacy = read_legacy_program(program, loss)
        return tune_legacy(program, legacy, chosen, precision=precision, global_batch=global_batch, progress=progress)
    graph = _graph(program, input_spec, labels_spec, loss, global_batch)
    return tune_graph(graph, chosen, precision=precision, global_batch=global_batch, progress=progress)


def tune_graph(
    graph: Graph,
    settings: Settings,
    *,
    precision: str = "fp32",
    global_batch: int | None = None,
    constraints: Sequence[Constraint] = (),
    progress: Callable[[int, int], None] | None = None,
    notes: Sequence[str] = (),
    rewrite: bool = True,
) -> Plan:
    """Plans a graph; see ``tune``. ``constraints`` narrow the search space, each with who asks for it. ``rewrite`` as in
    ``analyse``: for a program that is handed over to PIR. Raises TunerError for a cost model that reads legacy programs."""
    if settings.cost_model != "analytic":
        raise TunerError(
            f"cost_model {settings.cost_model!r} is Paddle's CostEstimator, which reads legacy programs only; "
            "choose 'analytic', or build the program with FLAGS_enable_pir_api=0"
        )
    cluster = detect_cluster() if settings.cluster is None else parse_cluster(settings.cluster)
    if settings.load_path is not None:
        plan = Plan.load(settings.load_path)
        plan.check_program(graph)
        plan.check_cluster(cluster)
        return plan
    _check_batch(global_batch)
    plugins = load_plugins(settings.blocked_plugins)
    analysis = analyse(graph, plugins.patterns, rewrite=rewrite)
    if global_batch is not None and global_batch % analysis.batch:
        raise TunerError(f"global_batch {global_batch} is no multiple of the batch of the program, {analysis.batch}")
    if not analysis.matches.matches:
        _warn_nothing_matched(analysis)
    space = SearchSpace.parse(settings.search_space)
    for constraint in constraints:
        space = space.restrict(constraint.reason, **constraint.values)
    training = Training(global_batch or analysis.batch, precision)  # type: ignore[arg-type]
    search = Search(analysis, cluster, training, space, settings.memory_reserve, progress, settings.time_limit)
    result = run_level(search, settings.level)
    plan = make_plan(analysis, result, cluster, training, settings.level, notes)
    if settings.save_path is not None:
        plan.save(settings.save_path)
    return plan


def _check_batch(global_batch: Any) -> None:
    whole = isinstance(global_batch, int) and not isinstance(global_batch, bool)
    if global_batch is not None and not (whole and 1 <= global_batch <= MAX_GLOBAL_BATCH):
        raise TunerError(f"global_batch is a number of samples from 1 to {MAX_GLOBAL_BATCH}, not {global_batch!r}")


def _graph(program: Any, input_spec: Any, labels_spec: Sequence[Any], loss: Any, global_batch: int | None) -> Graph:
    from paddle import nn

    if isinstance(program, nn.Layer):
        from paddle_rbt_plugin.handover.trace import trace_layer, with_batch

        if not input_spec or not isinstance(input_spec, (list, tuple)):
            raise TunerError("a Layer is planned on inputs of known shape: give input_spec=[paddle.static.InputSpec(...), ...]")
        specs, labels = with_batch(input_spec, labels_spec, global_batch)
        return trace_layer(program, specs, loss, labels).graph
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


def job_cluster(settings: Settings, world_size: int) -> Cluster:
    """The cluster of the running job. Raises ClusterError when the one described has another number of devices."""
    from paddle_rbt_plugin.cluster import check_job

    cluster = detect_cluster() if settings.cluster is None else parse_cluster(settings.cluster)
    check_job(cluster, world_size)
    return cluster
