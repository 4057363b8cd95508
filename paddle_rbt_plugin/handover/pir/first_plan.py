"""The plan of an engine that evaluates or predicts before it trains.

It is the plan of training, made of the training program for the batch that is evaluated, so that a later ``fit`` goes on under
it. Prediction has no labels, and the engine maybe no loss: there the mean of the outputs stands for it. A plan that is loaded
is taken as it is; its tensors are found by their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from paddle_rbt_plugin.cluster import Cluster, check_job
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.shared.engine_state import set_engine_plan
from paddle_rbt_plugin.handover.shared.strategy import settings_of
from paddle_rbt_plugin.plan.plan import Plan

_LOSS = "rule_based_loss"


def plan_before_training(engine: Any, mode: str, tune: Callable[[Any, str], Any]) -> None:
    """Plans the training of an engine that is to evaluate or predict; ``tune`` plans the program that the engine has built."""
    path = settings_of(engine._strategy.tuning).load_path
    if mode == "predict" and path is not None:
        plan = Plan.load(path)
        check_job(Cluster.from_dict(plan.cluster), paddle.distributed.get_world_size())
        set_engine_plan(engine, plan)
        return
    amp = engine._strategy.amp
    with paddle.amp.auto_cast(
        amp.enable, amp.custom_white_list, amp.custom_black_list, amp.level.upper(), amp.dtype, use_promote=amp.use_promote
    ):
        engine._build("train" if mode == "eval" else "predict")
    if mode == "predict":
        engine._fwd_main_progs["train"] = _with_loss(engine._fwd_main_progs["predict"])
        engine._startup_progs["train"] = engine._startup_progs["predict"]
        engine._loss_names = [_LOSS]
    try:
        tune(engine, "train")
    finally:
        for programs in (engine._fwd_main_progs, engine._startup_progs):
            del programs["train"]


def _with_loss(forward: Any) -> Any:
    """A copy of a program of prediction with the mean of its outputs as a loss. Raises TunerError where none is a float."""
    program = forward.clone()
    outputs = [op.operand_source(0) for op in program.global_block().ops if op.name() == "builtin.shadow_output"]
    floats = [v for v in outputs if v.initialized() and v.dtype in _FLOATS and not v.stop_gradient]
    if not floats:
        raise TunerError("the model returns no float that depends on a parameter, so prediction cannot be planned; fit first")
    with paddle.static.program_guard(program):
        means = [paddle.mean(value.astype("float32")) for value in floats]
        paddle._C_ops.set_persistable_value(means[0] if len(means) == 1 else paddle.add_n(means), _LOSS)
    return program


_FLOATS = (paddle.base.core.DataType.FLOAT32, paddle.base.core.DataType.FLOAT16, paddle.base.core.DataType.BFLOAT16)
