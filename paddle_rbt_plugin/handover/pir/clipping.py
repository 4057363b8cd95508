"""Clipping of gradients that are divided over ranks.

Paddle clips by global norm on shards, but it lacks clipping by value in PIR programs, and its ``clip_by_norm`` has no sharding
rule, so that every divided gradient is gathered. Both are written here in ops that run on shards: the norm of a gradient is
the root of the sum of its shards' squares, one number to reduce.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import paddle
from paddle import nn

from paddle_rbt_plugin.patching import Attribute, Setting, paddle_change


@paddle_change(">=3.0,<3.4")
def clipping_on_shards() -> Iterator[Setting]:
    """Lets PIR programs clip gradients as they lie, while Paddle makes them.

    Reason: ``ClipGradByValue`` raises NotImplementedError in PIR programs, and ``ClipGradByNorm`` gathers every gradient.
    """
    yield Attribute(nn.ClipGradByValue, "_pir_clip", _by_value)
    yield Attribute(nn.ClipGradByNorm, "_pir_clip", _by_norm(nn.ClipGradByNorm._pir_clip))


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
