"""Clipping of gradients that are divided over ranks.

Paddle clips by global norm on shards, but it lacks clipping by value in PIR programs, and its ``clip_by_norm`` has no sharding
rule, so that every divided gradient is gathered. Both are written here in ops that run on shards: the norm of a gradient is
the root of the sum of its shards' squares, one number to reduce. Versions: 3.0 to 3.3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn


def install() -> None:
    """Lets PIR programs clip so. Doing it again changes nothing."""
    nn.ClipGradByValue._pir_clip = _by_value
    if not hasattr(nn.ClipGradByNorm._pir_clip, "__wrapped__"):
        nn.ClipGradByNorm._pir_clip = _by_norm(nn.ClipGradByNorm._pir_clip)


def _by_value(clip: Any, params_grads: list[Any]) -> list[Any]:
    given = [(p, g) for p, g in params_grads if g is not None]
    return [(p, paddle.clip(g, clip.min, clip.max) if _is_clipped(p) else g) for p, g in given]


def _by_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip_all(clip: Any, params_grads: list[Any]) -> Any:
        if not any(g is not None and g.is_dist() for _, g in params_grads):
            return original(clip, params_grads)
        given = [(p, g) for p, g in params_grads if g is not None]
        return [(p, _with_norm(g, clip.clip_norm) if _is_clipped(p) else g) for p, g in given]

    return clip_all


def _is_clipped(parameter: Any) -> bool:
    return bool(getattr(parameter, "need_clip", True))


def _with_norm(gradient: Any, most: float) -> Any:
    """The gradient, scaled down to the norm ``most`` where its own is larger."""
    norm = paddle.sqrt(paddle.cast(paddle._C_ops.squared_l2_norm(gradient), "float32"))
    limit = paddle.full([1], most, "float32")
    return gradient * paddle.cast(limit / paddle.maximum(norm, limit), gradient.dtype)
