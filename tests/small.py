"""Small models, traced, for the tests of the hand-over."""

from __future__ import annotations

from typing import Any

import paddle

from paddle_rbt_plugin.handover.pir.trace import Trace, trace_layer
from paddle_rbt_plugin.models import GPTConfig, build, input_spec

SMALL_GPT = GPTConfig(layers=2, hidden=32, ffn=64, heads=4, vocab=128, seq=16)


def lazy_gpt(config: GPTConfig = SMALL_GPT) -> Any:
    with paddle.LazyGuard():
        return build(config)


def traced_gpt(config: GPTConfig = SMALL_GPT, batch: int = 8) -> Trace:
    return trace_layer(lazy_gpt(config), input_spec(config, batch))


def static_program(build_forward: Any) -> Any:
    """The PIR program that ``build_forward()`` builds."""
    program = paddle.static.Program()
    paddle.enable_static()
    try:
        with paddle.static.program_guard(program, paddle.static.Program()):
            build_forward()
    finally:
        paddle.disable_static()
    return program
