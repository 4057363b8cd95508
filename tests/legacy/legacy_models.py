"""Legacy programs of small models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.utils import unique_name

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.models import GPTConfig, build, input_spec

SMALL_GPT = {"hidden": 32, "ffn": 64, "heads": 8, "vocab": 128, "seq": 16}


@dataclass(frozen=True)
class LegacyProgram:
    """A serial forward program with its loss."""

    main: Any
    startup: Any
    loss: Any


def legacy_program(make_layer: Any, spec: Sequence[Any]) -> LegacyProgram:
    """The program of a Layer whose forward returns the loss."""
    main, startup = paddle.static.Program(), paddle.static.Program()
    with rbt.legacy_static_ops(), paddle.static.program_guard(main, startup), unique_name.guard():
        layer = make_layer()
        loss = layer(*[paddle.static.data(s.name, list(s.shape), s.dtype) for s in spec])
    return LegacyProgram(main, startup, loss)


def gpt(layers: int = 2, batch: int = 8, **sizes: Any) -> LegacyProgram:
    config = GPTConfig(**{"layers": layers, **SMALL_GPT, **sizes})
    return legacy_program(lambda: build(config), input_spec(config, batch))


def adamw() -> Any:
    return paddle.optimizer.AdamW(1e-3, grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0))


def one_plan(program: LegacyProgram, cluster: str = "1x8:V100-32G", **space: Any) -> rbt.Plan:
    """The plan with these degrees; those that are not given are 1."""
    degrees = {"pp": 1, "dp": 1, "mp": 1, **space}
    return rbt.tune(program.main, loss=program.loss, cluster=cluster, search_space=degrees)
