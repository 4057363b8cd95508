"""Gives engines of PIR programs their initial weights and their random streams.

Weights are shared when the engine cuts them, see ``copies``. Streams are set before each run, see ``random_streams``.
"""

from __future__ import annotations

import functools
from typing import Any

from paddle.distributed.auto_parallel.static.engine import Engine

from paddle_rbt_plugin.handover.copies import SharedOnTheWay
from paddle_rbt_plugin.handover.random_streams import Streams, common_seed
from paddle_rbt_plugin.handover.seeds import draws_from_device, stream_names
from paddle_rbt_plugin.handover.strategy import is_enabled

_STREAMS = "rule_based_streams"


def install() -> None:
    """Wraps the engine where it initializes a program and where it runs one."""
    initialize = Engine._initialize

    @functools.wraps(initialize)
    def with_common_weights(engine: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
        if not (engine._in_pir_mode and is_enabled(engine._strategy.tuning)):
            return initialize(engine, mode, *args, **kwargs)
        helper = engine.program_helper
        helper.init_pir = functools.partial(_init_shared, helper.init_pir, helper)
        try:
            result = initialize(engine, mode, *args, **kwargs)
        finally:
            del helper.init_pir
        if engine._executor is not None and _STREAMS not in vars(engine._executor):
            _run_on_streams(engine)
        return result

    Engine._initialize = with_common_weights


def keep_streams(engine: Any, mode: str, program: Any) -> None:
    """Remembers the random streams that the annotated program of a mode reads."""
    names, from_device = stream_names(program), draws_from_device(program)
    if names or from_device:
        vars(engine).setdefault(_STREAMS, {})[mode] = Streams(common_seed(), names, from_device)


def streams_of(engine: Any, mode: str) -> Streams | None:
    """The random streams of an engine's program; None where it draws no random numbers."""
    found: Streams | None = vars(engine).get(_STREAMS, {}).get(mode)
    return found


def _init_shared(init_pir: Any, helper: Any, *args: Any) -> Any:
    """Cuts the parameters that rank 0 has."""
    concrete = helper.concrete_program
    before = concrete.parameters
    concrete.parameters = (SharedOnTheWay(before[0]), *before[1:])
    try:
        return init_pir(*args)
    finally:
        concrete.parameters = before


def _run_on_streams(engine: Any) -> None:
    executor = engine._executor
    run = executor.run

    @functools.wraps(run)
    def run_step(*args: Any, **kwargs: Any) -> Any:
        streams = streams_of(engine, engine._mode)
        if streams is None:
            return run(*args, **kwargs)
        with streams.of_next_step():
            return run(*args, **kwargs)

    executor.run = run_step
    setattr(executor, _STREAMS, True)
