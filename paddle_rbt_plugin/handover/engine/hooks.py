"""Hooks the tuner into ``auto.Engine`` and ``dist.to_static``.

In PIR both call ``Engine._parallel_pir`` with the serial forward program of a mode. The hook runs the registered pass on a
clone of the program and passes the annotated clone on; Paddle then adds the backward pass, partitions and reshards. In the
legacy IR they call ``Engine._plan``, see ``handover.legacy.engine``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import paddle
from paddle.distributed.auto_parallel import constants
from paddle.distributed.auto_parallel.static.engine import Engine
from paddle.distributed.passes.pass_base import PassContext, new_pass

from paddle_rbt_plugin.cluster import ProcessMesh
from paddle_rbt_plugin.config import PASS_NAME, Settings
from paddle_rbt_plugin.errors import TunerWarning
from paddle_rbt_plugin.graph import read_program
from paddle_rbt_plugin.handover import checkpoint
from paddle_rbt_plugin.handover.engine import forward_loss, life
from paddle_rbt_plugin.handover.legacy import engine as legacy
from paddle_rbt_plugin.handover.passes import PLAN, apply_plan, placements_for
from paddle_rbt_plugin.handover.pir import (
    clipping,
    engine_programs,
    gradient_merge,
    inplace,
    parameter_attributes,
    patches,
    recompute,
    shared_weights,
    updates,
    zero,
)
from paddle_rbt_plugin.handover.pir.engine_programs import REPLICATED
from paddle_rbt_plugin.handover.pir.pipeline import check_order, schedulable
from paddle_rbt_plugin.handover.pir.seeds import draws_from_device, stream_names
from paddle_rbt_plugin.handover.pir.static_shapes import make_shapes_static
from paddle_rbt_plugin.handover.shared import engine_random
from paddle_rbt_plugin.handover.shared.engine_state import engine_plan, own_strategy, pass_attributes, set_engine_plan
from paddle_rbt_plugin.handover.shared.strategy import constraints_of, is_enabled, set_pipeline, settings_of
from paddle_rbt_plugin.patching import ENGINES_OF_SCRIPTS, Attribute, Item, Setting, paddle_change
from paddle_rbt_plugin.plan.plan import Plan


def install_hooks() -> None:
    """Installs the permanent changes: the fields of ``strategy.tuning`` and the hooks into engines. Further calls change
    nothing."""
    tuning_has_fields.install()
    legacy.install_hooks()
    forward_loss.engine_finds_forward_loss.install()
    forward_loss.dist_model_finds_forward_loss.install()
    patches.distributed_strategies_have_tuning.install()
    if not engine_tunes_pir.is_made:
        engine_programs.engine_keeps_programs.install(_tune, checkpoint.resume)
    life.engine_lives_in_pir.install()
    parameter_attributes.groups_remembered.install()
    engine_tunes_pir.install()


@paddle_change(">=2.6,<3.4", permanent="scripts create strategies before any code of this package runs")
def tuning_has_fields() -> Iterator[Setting]:
    """Declares the fields of ``strategy.tuning``.

    Reason: a strategy made from a dict takes only the fields that Paddle knows.
    """
    fields = constants.get_category_default_config(constants.TUNING)
    for name in ("pass_name", *Settings.names()):
        yield Item(fields, name, None)


@paddle_change(">=3.0,<3.4", permanent=ENGINES_OF_SCRIPTS)
def engine_tunes_pir() -> Iterator[Setting]:
    """Tunes the serial program of an engine before Paddle parallelizes it.

    Reason: Paddle has no hook for a tuner there; its own tuner runs after the backward pass.
    """
    from paddle_rbt_plugin.handover.engine import guard  # it reads what Paddle 2.6 lacks

    original = Engine._parallel_pir

    @functools.wraps(original)
    def parallel_pir(engine: Any, mode: str) -> Any:
        if is_enabled(engine._strategy.tuning):
            strategy, serial = own_strategy(engine), engine._fwd_main_progs[mode]
            make_shapes_static(serial)
            inplace.check_in_place(serial)
            _stop_gradients_at_data(serial)
            updates.check_optimizer(engine._optimizer)
            plan = _tune(engine, mode)
            stage = zero.stage_of(plan, strategy, engine._optimizer) if mode == "train" else 0
            recomputed = recompute.switched_on(strategy, engine._fwd_main_progs[mode], plan)
            with (
                patches.exact_partition(),
                life.unscheduled(engine, mode),
                schedulable(plan),
                recomputed,
                shared_weights.updated(engine, engine._fwd_main_progs[mode]),
                zero.divided(engine._optimizer, stage),
                guard.compared(engine, mode, plan, serial, stage),
                gradient_merge.averaged_first.apply(),
                clipping.clipping_on_shards.apply(),
                parameter_attributes.given(engine._optimizer if mode == "train" else None, engine._model),
            ):
                return original(engine, mode)
        if engine._strategy.auto_mode == "full_rule_based":
            warnings.warn(
                "strategy.auto_mode 'full_rule_based' selects Paddle's own tuner, which reads only legacy programs and "
                f"ignores this one; use strategy.tuning with pass_name {PASS_NAME!r} instead",
                TunerWarning,
                stacklevel=2,
            )
        return original(engine, mode)

    yield Attribute(Engine, "_parallel_pir", parallel_pir)


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
        graph = read_program(program, needs_loss=False)
        placements = placements_for(graph, plan, getattr(engine, REPLICATED, False))
        apply_plan(program, plan, placements, settings_of(strategy.tuning).blocked_plugins)
    engine._fwd_main_progs[mode] = program
    engine_random.set_streams(engine, mode, stream_names(program), "" if draws_from_device(program) else None)
    check_order(plan)
    set_pipeline(strategy, plan)
    engine.rule_based_mesh = _mesh_of_this_rank(plan)
    _tell_data_rank(engine, engine.rule_based_mesh)
    return plan


def _stop_gradients_at_data(program: Any) -> None:
    """Marks inputs, and values computed only from inputs, as needing no gradient. The engine leaves this open, and would
    compute unused gradients of its inputs and sum them over the ranks."""
    for op in program.global_block().ops:
        if op.name() == "pd_op.data" or all(v.stop_gradient for v in op.operands_source() if v.initialized()):
            for value in op.results():
                if value.initialized() and not value.persistable:
                    value.stop_gradient = True


def _mesh_of_this_rank(plan: Plan) -> ProcessMesh:
    rank = paddle.distributed.get_rank()
    return next((stage.process_mesh for stage in plan.stages if rank in stage.devices), plan.stages[0].process_mesh)


def _tell_data_rank(engine: Any, mesh: ProcessMesh) -> None:
    """Sets what Paddle's planner sets in the legacy IR but not in PIR: how the data is split over ranks, and which part this
    rank reads."""
    rank = paddle.distributed.get_rank()
    inputs = len(engine._inputs_spec) + len(engine._labels_spec)
    engine._dp_world_sizes = [mesh.degree("dp")] * inputs
    engine._dp_ranks = [mesh.coordinate(rank, "dp")] * inputs
