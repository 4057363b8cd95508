"""Gives engines of PIR programs their initial weights and their random streams.

Weights are broadcast when the engine shards them (``copies``), and streams are set before each run (``random_streams``). Both
apply to programs of either IR; ``legacy.random`` has what only legacy programs need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paddle.distributed.auto_parallel.static.engine import Engine

from paddle_rbt_plugin.handover.shared.copies import SharedOnTheWay
from paddle_rbt_plugin.handover.shared.random_streams import Source, Streams, common_seed
from paddle_rbt_plugin.handover.shared.strategy import is_enabled
from paddle_rbt_plugin.patching import ENGINES_OF_SCRIPTS, Attribute, Setting, paddle_change

_STREAMS, _LATEST, _SOURCE = "rule_based_streams", "rule_based_latest", "rule_based_random"


@paddle_change(">=2.6,<3.4", permanent=ENGINES_OF_SCRIPTS)
def engine_starts_alike(initialize_legacy: Callable[[Callable[[], Any], Any, str], Any]) -> Iterator[Setting]:
    """Wraps the engine's initialization and execution of programs. ``initialize_legacy`` initializes a legacy program of an
    engine and mode, given Paddle's own function.

    Reason: in Paddle every rank keeps the weights and random numbers of its own seed.
    """
    initialize = Engine._initialize

    @functools.wraps(initialize)
    def with_common_weights(engine: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
        if not is_enabled(engine._strategy.tuning):
            return initialize(engine, mode, *args, **kwargs)
        start = _initialize_pir if getattr(engine, "_in_pir_mode", False) else initialize_legacy
        result = start(functools.partial(initialize, engine, mode, *args, **kwargs), engine, mode)
        executor = engine._executor
        if executor is not None and _STREAMS not in vars(executor):
            vars(executor)[_STREAMS] = True
            executor.run = _on_streams(engine, executor.run)
        return result

    yield Attribute(Engine, "_initialize", with_common_weights)


def set_streams(engine: Any, mode: str, names: Sequence[str], device: str | None) -> None:
    """Stores the random streams of a mode by name, and the shard computed by ops that draw from the device's generator."""
    vars(engine).setdefault(_STREAMS, {})[mode] = Streams(source_of(engine), tuple(names), device)
    vars(engine)[_LATEST] = mode


def source_of(engine: Any) -> Source:
    """The source of an engine's random numbers: the seed that all ranks share, and the number of runs. Both can be set, to the
    same values on all ranks."""
    if _SOURCE not in vars(engine):
        vars(engine)[_SOURCE] = Source(common_seed())
    found: Source = vars(engine)[_SOURCE]
    return found


def streams_of(engine: Any, mode: str) -> Streams | None:
    """The random streams of an engine's program for a mode, the one prepared last."""
    found: Streams | None = vars(engine).get(_STREAMS, {}).get(mode)
    return found


def _on_streams(engine: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """An executor's ``run`` with the streams of the next step. In PIR each program has its own executor; legacy programs share
    one."""
    own = streams_of(engine, vars(engine).get(_LATEST, "")) if getattr(engine, "_in_pir_mode", False) else None

    @functools.wraps(run)
    def run_step(*args: Any, **kwargs: Any) -> Any:
        streams = own or streams_of(engine, engine._mode)
        if streams is None:
            return run(*args, **kwargs)
        with streams.of_next_step():
            return run(*args, **kwargs)

    return run_step


def _initialize_pir(initialize: Callable[[], Any], engine: Any, mode: str) -> Any:
    helper = engine.program_helper
    if helper is None:
        return initialize()
    helper.init_pir = functools.partial(_init_shared, helper.init_pir, helper)
    try:
        return initialize()
    finally:
        del helper.init_pir


def _init_shared(init_pir: Any, helper: Any, *args: Any) -> Any:
    """Shards the parameters of rank 0."""
    concrete = helper.concrete_program
    before = concrete.parameters
    concrete.parameters = (SharedOnTheWay(before[0]), *before[1:])
    try:
        return init_pir(*args)
    finally:
        concrete.parameters = before
