"""Paddle's Strategy and the tuner: the constraints of a strategy, and the strategy of a plan."""

from __future__ import annotations

import difflib
from typing import Any

from paddle_rbt_plugin.config import PASS_NAME, Settings
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.request import Constraint

_PRECISIONS = {"float16": "fp16", "bfloat16": "bf16"}


def is_enabled(tuning: Any) -> bool:
    """True when ``strategy.tuning`` asks for this tuner; ``enable`` without ``pass_name`` keeps Paddle's own meaning.

    Raises TunerError for the name of a pass that is not registered."""
    from paddle.distributed.passes.pass_base import PassBase

    if tuning is None or not tuning.enable:
        return False
    name = _field(tuning, "pass_name")
    if name is not None and name not in PassBase._REGISTERED_PASSES:
        near = difflib.get_close_matches(str(name), [PASS_NAME, *PassBase._REGISTERED_PASSES], 1)
        raise TunerError(
            f"strategy.tuning.pass_name {name!r} is no registered pass; did you mean {(near or [PASS_NAME])[0]!r}?"
        )
    return bool(name == PASS_NAME)


def _field(tuning: Any, name: str) -> Any:
    """A field of ``strategy.tuning``. A strategy made from a dict before this package was imported lacks the fields unknown to
    Paddle, but it keeps the dict."""
    value = getattr(tuning, name, None)
    return (tuning._config_dict or {}).get(name) if value is None else value


def settings_of(tuning: Any) -> Settings:
    """The settings in ``strategy.tuning``. Raises TunerError for a field that does not exist, from a dict or an attribute."""
    from paddle.distributed.auto_parallel import constants

    known = set(constants.get_category_default_config(constants.TUNING))
    for name in [*(tuning._config_dict or {}), *vars(tuning)]:
        if name not in known and not name.startswith("_"):
            near = difflib.get_close_matches(name, sorted(known), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TunerError(f"strategy.tuning has no field {name!r}{hint}")
    return Settings.from_mapping({name: _field(tuning, name) for name in Settings.names()})


def precision_of(strategy: Any) -> str | None:
    """The training precision according to ``strategy.amp``; None without it, for that of the weights."""
    return _PRECISIONS[strategy.amp.dtype] if strategy.amp.enable else None


def set_pipeline(strategy: Any, plan: Plan) -> None:
    """Sets ``strategy.pipeline`` as planned; a plan with one stage leaves it unchanged."""
    if plan.degrees["pp"] == 1:
        return
    strategy.pipeline.enable = True
    strategy.pipeline.schedule_mode = plan.schedule
    strategy.pipeline.micro_batch_size = plan.micro_batch
    strategy.pipeline.accumulate_steps = plan.accumulate_steps
    strategy.pipeline.pp_degree = plan.degrees["pp"]
    strategy.pipeline.vpp_degree = plan.vpp


def accumulate_steps_of(strategy: Any) -> int:
    """Micro batches per optimizer step; the program computes one of them."""
    if strategy.pipeline.enable:
        return int(strategy.pipeline.accumulate_steps)
    return int(strategy.gradient_merge.k_steps) if strategy.gradient_merge.enable else 1


def constraints_of(strategy: Any, legacy: bool = False) -> list[Constraint]:
    """The constraints of the strategy, and of what the engine can execute in that IR. ``recompute.constraints`` and
    ``zero.constraint`` have those of PIR programs on recomputation and on divided states."""
    recompute = None if not legacy else "full" if strategy.recompute.enable else "none"
    sharding = None if not legacy else int(strategy.sharding.stage) if strategy.sharding.enable else 0
    pipeline = legacy or strategy.pipeline.enable or not _is_cpu_job()
    steps = accumulate_steps_of(strategy)
    constraints = as_the_program_runs(steps, recompute, sharding, legacy, pipeline, None if legacy else _not_interleaved())
    if strategy.pipeline.enable:
        constraints.append(Constraint("strategy.pipeline", {"schedule": (strategy.pipeline.schedule_mode,)}))
        for name, dimension in (("pp_degree", "pp"), ("vpp_degree", "vpp")):
            degree = int(getattr(strategy.pipeline, name, 1))
            if degree > 1:
                constraints.append(Constraint(f"strategy.pipeline.{name}", {dimension: (degree,)}))
    return constraints


def _not_interleaved() -> str | None:
    """Why the engine cannot run the interleaved schedule for PIR programs; None if it can."""
    return None if can_interleave() else "executing a PIR program by Paddle 3.0, which cannot interleave it"


def can_interleave() -> bool:
    """Whether this Paddle can split interleaved PIR programs into jobs; 3.0 fails on the optimizer's part of a marked
    program."""
    from paddle.distributed.passes.pipeline_scheduler_pass.pipeline_vpp import PipelineVirtualPipelinePass

    return hasattr(PipelineVirtualPipelinePass, "RECV_FORWARD")


def as_the_program_runs(
    steps: int = 1,
    recompute: str | None = "none",
    sharding: int | None = 0,
    legacy: bool = False,
    pipeline: bool = False,
    not_interleaved: str | None = "executing a program outside of auto.Engine and dist.to_static",
) -> list[Constraint]:
    """Constraints for annotated programs: they accumulate, recompute and shard as the surrounding strategy says, and in PIR are
    not interleaved if ``not_interleaved`` gives a reason. If ``recompute`` or ``sharding`` is None, it follows the plan."""
    kept: dict[str, tuple] = {"sequence_parallel": (False,), "layer_meshes": ("one",)}
    executed = [Constraint(f"executing a {'legacy' if legacy else 'PIR'} program in this version", kept)]
    if not legacy and not_interleaved is not None:
        executed.append(Constraint(not_interleaved, {"schedule": ("1F1B", "FThenB"), "vpp": (1,)}))
    if not legacy and not pipeline:
        executed.append(Constraint("executing a PIR program while strategy.pipeline is off", {"pp": (1,)}))
    if recompute is not None:
        executed.append(Constraint("strategy.recompute", {"recompute": (recompute,)}))
    if sharding is not None:
        executed.append(Constraint("strategy.sharding", {"sharding_stage": (sharding,), "sharding_degree": ("whole",)}))
    return [*executed, Constraint("strategy.gradient_merge", {"accumulate_steps": (steps,)})]


def _is_cpu_job() -> bool:
    """Static programs of CPU processes can neither send nor receive."""
    import paddle

    return not paddle.is_compiled_with_cuda()


def to_strategy(plan: Plan) -> Any:
    """A ``paddle.distributed.Strategy`` with the pipeline, accumulation, recomputation, sharding and precision of the plan."""
    import paddle.distributed as dist

    strategy = dist.Strategy()
    set_pipeline(strategy, plan)
    if plan.degrees["pp"] == 1 and plan.accumulate_steps > 1:
        strategy.gradient_merge.enable = True
        strategy.gradient_merge.k_steps = plan.accumulate_steps
        strategy.gradient_merge.avg = True
    if plan.recompute != "none":
        strategy._recompute.enable = True  # not public on this class, but read by dist.to_static
    if plan.sharding_stage:
        strategy.sharding.enable = True
        strategy.sharding.stage = plan.sharding_stage
        strategy.sharding.degree = plan.degrees["dp"] if plan.sharding_degree == "whole" else plan.sharding_degree
    if plan.precision != "fp32":
        strategy.amp.enable = True
        strategy.amp.dtype = {"fp16": "float16", "bf16": "bfloat16"}[plan.precision]
        strategy.amp.level = "O2"
    return strategy
