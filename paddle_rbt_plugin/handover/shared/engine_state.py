"""What the hooks of both IRs share: the plan of an engine, and the attributes of the pass that makes it."""

from __future__ import annotations

import copy
from typing import Any

from paddle_rbt_plugin.config import PASS_NAME, Settings
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.shared.strategy import accumulate_steps_of, precision_of, settings_of
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.request import Constraint

_ENGINE_PLAN = "rule_based_plan"
_OWN_STRATEGY = "rule_based_strategy"


def engine_plan(engine: Any) -> Plan | None:
    """The plan that the tuner made for an ``auto.Engine`` or a ``DistModel``; None before it is prepared."""
    return getattr(getattr(engine, "_engine", engine), _ENGINE_PLAN, None)


def set_engine_plan(engine: Any, plan: Plan) -> None:
    """Stores the training plan, which evaluation and prediction use too, and logs it."""
    setattr(engine, _ENGINE_PLAN, plan)
    degrees = " x ".join(f"{axis} {n}" for axis, n in plan.degrees.items())
    engine._logger.info(f"{PASS_NAME}: training under {degrees}; rbt.engine_plan(engine).explain() says why")


def own_strategy(engine: Any) -> Any:
    """The strategy of an engine; the first call replaces it with a copy of the user's. The plan's pipeline is written into it,
    and Paddle writes accumulation and precision levels, which must not affect other engines with the same strategy."""
    if getattr(engine, _OWN_STRATEGY, None) is not engine._strategy:
        engine._strategy = copy.deepcopy(engine._strategy)
        setattr(engine, _OWN_STRATEGY, engine._strategy)
    return engine._strategy


def pass_attributes(engine: Any, mode: str, constraints: list[Constraint]) -> dict[str, Any]:
    """The attributes of the pass that plans the program of ``mode``, except the loss.

    Raises TunerError for a mode other than training, which has no plan of its own, and for unknown or wrong fields."""
    if mode != "train":
        raise TunerError(
            f"mode {mode!r} uses the training plan, which does not exist yet: prepare or fit the engine for training first"
        )
    settings = settings_of(engine._strategy.tuning)
    attrs: dict[str, Any] = {name: getattr(settings, name) for name in Settings.names()}
    attrs |= {"precision": precision_of(engine._strategy), "constraints": constraints}
    steps = accumulate_steps_of(engine._strategy)
    if steps > 1 and settings.load_path is None:  # a loaded plan has its own batch; a warning says if the strategy differs
        attrs["global_batch"] = steps * int(engine._inputs_spec[0].shape[0])
    return attrs
