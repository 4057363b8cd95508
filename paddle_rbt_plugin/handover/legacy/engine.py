"""Hooks the tuner into ``auto.Engine`` where it trains legacy programs.

There the engine reaches ``_plan`` with a DistributedContext of the serial program. The hook annotates that program through
the registered pass; Paddle's Planner completes it, and its Parallelizer does the rest.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import paddle
from paddle.distributed.auto_parallel.static.engine import Engine
from paddle.distributed.passes.pass_base import PassContext, new_pass

from paddle_rbt_plugin.config import PASS_NAME
from paddle_rbt_plugin.errors import TunerError, TuningFinished
from paddle_rbt_plugin.graph.legacy import LegacyGraph, read_legacy_program
from paddle_rbt_plugin.handover.legacy import patches, random
from paddle_rbt_plugin.handover.legacy.annotate import annotate, check_completed
from paddle_rbt_plugin.handover.legacy.ops import legacy_static_ops
from paddle_rbt_plugin.handover.shared import engine_random
from paddle_rbt_plugin.handover.shared.conversion import paddle_mesh
from paddle_rbt_plugin.handover.shared.copies import share_all
from paddle_rbt_plugin.handover.shared.engine_state import engine_plan, own_strategy, pass_attributes, set_engine_plan
from paddle_rbt_plugin.handover.shared.gloo import enable_static_training_on_cpu
from paddle_rbt_plugin.handover.shared.random_streams import common_seed
from paddle_rbt_plugin.handover.shared.strategy import constraints_of, is_enabled
from paddle_rbt_plugin.patching import ENGINES_OF_SCRIPTS, Attribute, Setting, paddle_change
from paddle_rbt_plugin.plan.plan import Plan

_STAGE = "PADDLE_AUTO_PARALLEL_STAGE"
_CONFIG = "PADDLE_AUTO_PARALLEL_CONFIG"
_GPU_ONLY = {
    "c_concat": "gathers a tensor that is sharded along its last dimension, such as the logits of a sharded vocabulary; keep "
    "the vocabulary whole with strategy.tuning.blocked_plugins = ['shared_word_embedding', 'lm_head']",
    "send_v2": "sends to the next pipeline stage; plan without a pipeline, search_space={'pp': 1}",
    "recv_v2": "receives from the previous pipeline stage; plan without a pipeline, search_space={'pp': 1}",
}
"""Communication whose CPU kernel only raises, what it is for, and how to plan without it."""


def install_hooks() -> None:
    """Makes the changes that stay. Doing it again changes nothing."""
    patches.engine_starts_without_cuda.install()
    if not engine_tunes_legacy_programs.is_made:
        engine_random.engine_starts_alike.install(_initialize)
    engine_tunes_legacy_programs.install()


@paddle_change(">=2.6,<3.4", permanent=ENGINES_OF_SCRIPTS)
def engine_tunes_legacy_programs() -> Iterator[Setting]:
    """Tunes the serial program of an engine before Paddle completes it. PIR engines never reach ``_plan``.

    Reason: Paddle has no place for a tuner but its own there.
    """
    plan_original, parallel_original, prepare_original = Engine._plan, Engine._parallel, Engine._prepare_program

    @functools.wraps(plan_original)
    def plan(engine: Any, mode: str) -> Any:
        if not is_enabled(engine._strategy.tuning):
            return plan_original(engine, mode)
        tuned, legacy = _tune(engine, mode)
        result = plan_original(engine, mode)
        check_completed(engine._dist_contexts[mode], legacy, tuned)
        return result

    @functools.wraps(parallel_original)
    def parallel(engine: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
        if not is_enabled(engine._strategy.tuning):
            return parallel_original(engine, mode, *args, **kwargs)
        with random.controlled(engine._cur_rank) as streams:
            result = parallel_original(engine, mode, *args, **kwargs)
        random.draw_local_shapes(engine._dist_contexts[mode].dist_main_programs[engine._cur_rank])
        device = random.device_shard(engine._dist_contexts[mode], engine._cur_rank)
        engine_random.set_streams(engine, mode, streams, device)
        check_clips(engine._dist_contexts[mode])
        programs = list(engine._dist_contexts[mode].dist_main_programs.values())
        check_batches(programs)
        if not paddle.is_compiled_with_cuda():
            check_runs_on_cpu(programs)
            if paddle.distributed.get_world_size() > 1:
                patches.reduce_norms_on_cpu(programs, range(paddle.distributed.get_world_size()))
        return result

    @functools.wraps(prepare_original)
    def prepare(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(engine, "_in_pir_mode", False):
            return prepare_original(engine, *args, **kwargs)
        with patches.cpu_needs_no_synchronization.apply():
            if not is_enabled(engine._strategy.tuning):
                return prepare_original(engine, *args, **kwargs)
            patches.leave_out_sequence_parallel_pass(own_strategy(engine))
            with legacy_static_ops():
                return prepare_original(engine, *args, **kwargs)

    yield Attribute(Engine, "_plan", plan)
    yield Attribute(Engine, "_parallel", parallel)
    yield Attribute(Engine, "_prepare_program", prepare)


def _initialize(initialize: Callable[[], Any], engine: Any, mode: str) -> Any:
    if engine._executor is not None:  # the weights are there
        return initialize()
    if engine._dygraph_mode:
        share_all((p.name, p) for p in (*engine._model.parameters(), *engine._model.buffers()))
        return initialize()
    with random.initial_draws(common_seed(), engine._cur_rank):
        result = initialize()
    random.share_in_scope(engine._dist_contexts[mode], engine._place)
    return result


def check_clips(context: Any) -> None:
    """Raises TunerError where partitioned programs clip the part of a gradient that a rank holds by the norm of that part."""
    for program in context.dist_main_programs.values():
        block = program.global_block()
        for op in (op for op in block.ops if op.type == "clip_by_norm"):
            gradient = op.input("X")[0]
            placed = context.get_tensor_dist_attr_for_program(block.vars[gradient])
            degrees = placed.process_mesh.shape if placed is not None else []
            if placed is not None and any(axis >= 0 and degrees[axis] > 1 for axis in placed.dims_mapping):
                raise TunerError(
                    f"in legacy programs ClipGradByNorm would clip each part of {gradient!r}, which the plan shards, by the "
                    f"norm of that part; use ClipGradByGlobalNorm or ClipGradByValue, or plan with search_space={{'mp': 1}}"
                )


def check_batches(programs: Iterable[Any]) -> None:
    """Raises TunerError where Paddle goes on with a part of a sum that all ranks have, which no plan asks for: weights that are
    read then see half of a batch, and their gradients lack the other half."""
    for program in programs:
        ops = program.global_block().ops
        for before, op in pairwise(ops):
            cut = op.type == "split" and "/auto_parallel/reshard" in op.attr("op_namescope") and op.attr("axis") == 0
            if cut and before.type in _REDUCTIONS and before.output_arg_names[0] == op.input_arg_names[0]:
                raise TunerError(
                    f"Paddle's completion divides the batch of {op.input_arg_names[0]!r} over ranks that the plan gives the "
                    "whole batch, which would train a different model; plan without sharding the values that are summed "
                    "there, for example with search_space={'mp': 1}"
                )


_REDUCTIONS = ("all_reduce", "c_allreduce_sum")


def check_runs_on_cpu(programs: Iterable[Any]) -> None:
    """Raises TunerError for partitioned programs that communicate in a way which Paddle implements for GPUs only; left alone
    they would end in Paddle's error in the middle of the first step."""
    for op in (op for program in programs for op in program.global_block().ops):
        if op.type in _GPU_ONLY:
            raise TunerError(
                f"CPU processes cannot train under this plan: {op.type}, which only GPUs have a kernel for, "
                f"{_GPU_ONLY[op.type]}"
            )


def _tune(engine: Any, mode: str) -> tuple[Plan, LegacyGraph]:
    """Annotates the program of a mode: that of training is planned, the others follow its plan.

    Raises TunerError where the strategy lets Paddle's own tuner plan, too."""
    auto_mode = engine._strategy.auto_mode
    if not auto_mode.startswith("semi"):
        raise TunerError(
            f"strategy.auto_mode {auto_mode!r} enables Paddle's own tuner, and strategy.tuning enables this one; keep "
            "auto_mode at 'semi'"
        )
    program = engine._dist_contexts[mode]._original_serial_main_program
    loss = engine._losses[0].name if engine._losses and mode != "predict" else None
    plan = engine_plan(engine)
    legacy = read_legacy_program(program, loss, needs_loss=loss is not None)
    if plan is None:
        attrs = with_paths_of_job(pass_attributes(engine, mode, constraints_of(engine._strategy, legacy=True)))
        startup = engine._dist_contexts[mode]._original_serial_startup_program
        context = PassContext()
        new_pass(PASS_NAME, attrs | {"loss": loss}).apply([program], [startup], context)
        plan = context.get_attr("plan")
        set_engine_plan(engine, plan)
        if os.environ.get(_STAGE) == "tuner":
            saved = f"it is saved in {attrs['save_path']!r}" if attrs.get("save_path") else "it is not saved"
            raise TuningFinished(f"{_STAGE} is 'tuner', so the job ends with the plan; {saved}", plan)
    else:
        annotate(program, legacy, plan)
    enable_static_training_on_cpu([paddle_mesh(stage.process_mesh) for stage in plan.stages])
    return plan, legacy


def with_paths_of_job(attrs: dict[str, Any]) -> dict[str, Any]:
    """The attributes with ``tuner_save_path`` and ``tuner_load_path`` of the JSON that PADDLE_AUTO_PARALLEL_CONFIG names,
    where the strategy names no path; a plan that is not there yet is not loaded. Raises TunerError for a file that cannot be
    read."""
    path = os.environ.get(_CONFIG)
    if not path:
        return attrs
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        save, load = config.get("tuner_save_path"), config.get("tuner_load_path")
    except (OSError, ValueError, AttributeError) as error:
        raise TunerError(f"{_CONFIG} names {path!r}, which is not a readable JSON object: {error}") from error
    found = {"save_path": save, "load_path": load if load and os.path.exists(load) else None}
    attrs = attrs | {key: value for key, value in found.items() if value and not attrs.get(key)}
    if attrs.get("load_path"):  # a loaded plan has its batch; where the strategy accumulates otherwise, it is warned about
        attrs.pop("global_batch", None)
    return attrs
