"""Normalisation of hidden states and heads, written out where Paddle's fused kernels are missing from CPU wheels."""

from __future__ import annotations

import paddle
from paddle import nn

from paddle_rbt_plugin.models.transformer import Norm


class RMSNorm(nn.Layer):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467), or times 1 + weight."""

    def __init__(self, width: int, eps: float, plus_one: bool = False):
        super().__init__()
        self.eps, self.plus_one = eps, plus_one
        start = nn.initializer.Constant(0.0 if plus_one else 1.0)
        self.weight = self.create_parameter([width], default_initializer=start)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        variance = paddle.mean(paddle.pow(x, 2), axis=-1, keepdim=True)
        scale = self.weight + 1.0 if self.plus_one else self.weight
        return x * paddle.rsqrt(variance + self.eps) * scale


def make_norm(norm: Norm, width: int) -> nn.Layer:
    """The Layer that normalises vectors of ``width``."""
    return nn.LayerNorm(width, norm.eps) if norm.kind == "layer" else RMSNorm(width, norm.eps, norm.plus_one)
