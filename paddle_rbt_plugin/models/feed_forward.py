"""Feed-forward networks, gated and plain."""

from __future__ import annotations

import paddle
from paddle import nn
from paddle.nn import functional as F

from paddle_rbt_plugin.models.projection import linear
from paddle_rbt_plugin.models.transformer import FeedForward, Transformer

_CLAMP, _SLOPE = 7.0, 1.702
"""Of GPT-OSS's activation (``swiglu_limit`` and ``alpha`` of its reference implementation)."""


class PlainFeedForward(nn.Layer):
    """act(x W1 + b1) W2 + b2."""

    def __init__(self, config: Transformer, part: FeedForward):
        super().__init__()
        self.activation = part.activation
        self.up_proj = linear(config, config.hidden, part.width, part.bias)
        self.down_proj = linear(config, part.width, config.hidden, part.bias)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.down_proj(activate(self.activation, self.up_proj(x)))


class GatedFeedForward(nn.Layer):
    """(act(x Wg) * (x Wu)) Wd (arXiv 2002.05202)."""

    def __init__(self, config: Transformer, part: FeedForward):
        super().__init__()
        self.activation = part.activation
        self.gate_proj = linear(config, config.hidden, part.width, part.bias)
        self.up_proj = linear(config, config.hidden, part.width, part.bias)
        self.down_proj = linear(config, part.width, config.hidden, part.bias)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.down_proj(gate(self.activation, self.gate_proj(x), self.up_proj(x)))


def make_feed_forward(config: Transformer, part: FeedForward) -> nn.Layer:
    """The Layer of a feed-forward network."""
    return GatedFeedForward(config, part) if part.gated else PlainFeedForward(config, part)


def activate(name: str, x: paddle.Tensor) -> paddle.Tensor:
    """One of the activations of one argument."""
    if name == "silu":
        return F.silu(x)
    return F.relu(x) if name == "relu" else F.gelu(x, approximate=name == "gelu_tanh")


def gate(name: str, gated: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
    """What a gate lets through of ``up``."""
    if name != "clamped_swish":
        return activate(name, gated) * up
    gated, up = paddle.clip(gated, max=_CLAMP), paddle.clip(up, -_CLAMP, _CLAMP)
    return gated * F.sigmoid(paddle.scale(gated, _SLOPE)) * (up + 1.0)
