"""Hooks the tuner into ``auto.Engine`` and ``dist.to_static``.

In PIR both reach ``Engine._parallel_pir`` with the serial forward program of a mode. The hook runs the registered pass on a
clone of it and hands the annotated clone on; completion of the backward pass, partition and reshard are Paddle's own from
there. In the legacy IR they reach ``Engine._plan``, see ``handover.legacy.engine``.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import paddle
from paddle.distributed.auto_parallel import constants
from paddle.distributed.auto_parallel.static.engine import Engine
from paddle.distributed.passes.pass_base import PassContext, new_pass

from paddle_rbt_plugin.cluster import ProcessMesh
from paddle_rbt_plugin.completion import Placement, data_parallel
from paddle_rbt_plugin.config import PASS_NAME, Settings
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.graph import read_program
from paddle_rbt_plugin.handover import gradient_merge, patches, recompute, shared_weights, zero
from paddle_rbt_plugin.handover.engine_state import engine_plan, pass_attributes, set_engine_plan
from paddle_rbt_plugin.handover.legacy import engine as legacy
from paddle_rbt_plugin.handover.passes import PLAN, apply_plan
from paddle_rbt_plugin.handover.pipeline import check_order, schedulable
from paddle_rbt_plugin.handover.strategy import constraints_of, is_enabled, set_pipeline
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.tuner import TunerWarning


def install() -> None:
    """Declares the fields of ``strategy.tuning`` and wraps the engine. Doing it again changes nothing."""
    if getattr(Engine._plan, PASS_NAME, False):
        return
    for name in ("pass_name", *Settings.names()):
        constants.set_field_default_config(constants.TUNING, name, None)
    legacy.install()
    if not hasattr(Engine, "_parallel_pir"):  # Paddle 2.6 trains legacy programs only
        return
    patches.give_distributed_strategy_tuning()
    patches.let_engine_fit_in_pir()
    patches.let_shards_become_partial()
    original = Engine._parallel_pir

    @functools.wraps(original)
    def parallel_pir(engine: Any, mode: str) -> Any:
        if is_enabled(engine._strategy.tuning):
            plan = _tune(engine, mode)
            stage = zero.stage_of(plan, engine._strategy, engine._optimizer) if mode == "train" else 0
            recomputed = recompute.switched_on(engine._strategy, engine._fwd_main_progs[mode], plan)
            copied = shared_weights.updated(engine, engine._fwd_main_progs[mode])
            divided = zero.divided(engine._optimizer, stage)
            with schedulable(plan), recomputed, copied, divided, gradient_merge.averaged_first():
                return original(engine, mode)
        if engine._strategy.auto_mode == "full_rule_based":
            warnings.warn(
                "strategy.auto_mode 'full_rule_based' is Paddle's own tuner, which reads legacy programs only and does nothing "
                f"with this one; strategy.tuning with pass_name {PASS_NAME!r} tunes it",
                TunerWarning,
                stacklevel=2,
            )
        return original(engine, mode)

    setattr(parallel_pir, PASS_NAME, True)
    Engine._parallel_pir = parallel_pir


def _tune(engine: Any, mode: str) -> Plan:
    strategy = engine._strategy
    program = engine._fwd_main_progs[mode].clone()
    plan = engine_plan(engine)
    if plan is None:
        limits = [*constraints_of(strategy), *recompute.constraints(strategy, program)]
        limits.append(zero.constraint(strategy, engine._optimizer))
        attrs = pass_attributes(engine, mode, limits)
        attrs["loss"] = program.get_output_value_by_name(engine._loss_names[0])
        context = PassContext()
        new_pass(PASS_NAME, attrs).apply([program], [engine._startup_progs[mode]], context)
        plan = context.get_attr(PLAN)
        set_engine_plan(engine, plan)
    else:
        apply_plan(program, plan, _placements_for(program, plan))
    engine._fwd_main_progs[mode] = program
    check_order(plan)
    set_pipeline(strategy, plan)
    patches.tell_engine_its_data_rank(engine, _mesh_of_this_rank(plan))
    return plan


def _mesh_of_this_rank(plan: Plan) -> ProcessMesh:
    rank = paddle.distributed.get_rank()
    return next((stage.process_mesh for stage in plan.stages if rank in stage.devices), plan.stages[0].process_mesh)


def _placements_for(program: Any, plan: Plan) -> dict[str, Placement]:
    """Placements for another program of the same model, that of evaluation or prediction: parameters as planned, data by
    the batch. Raises TunerError for a parameter that the plan does not know."""
    graph = read_program(program, needs_loss=False)
    mesh = plan.stages[0].process_mesh
    batch = graph.data[0].shape[0]
    placements = {}
    for t in (*graph.params, *graph.data):
        if t.name in plan.tensors:
            placements[t.name] = plan.tensors[t.name].placement
        elif t.kind == "data":
            replicated = Placement.replicated(t.ndim)
            placements[t.name] = data_parallel(t.shape, batch, mesh.axes.index("dp")) if "dp" in mesh.axes else replicated
        else:
            raise TunerError(f"the program reads the parameter {t.name!r}, which the plan of training does not place")
    return placements
