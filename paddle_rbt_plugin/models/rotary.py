"""Rotary positions (arXiv 2104.09864) of heads, or of the first part of each."""

from __future__ import annotations

import paddle


def rotary_tables(seq: int, width: int, theta: float) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Cosine and sine of every position times every frequency, [1, seq, 1, width] (equation 34)."""
    exponents = paddle.arange(0, width, 2, dtype="float32") / width
    angles = paddle.outer(paddle.arange(seq, dtype="float32"), theta**-exponents)
    angles = paddle.reshape(paddle.concat([angles, angles], axis=-1), [1, seq, 1, width])
    return paddle.cos(angles), paddle.sin(angles)


def rotate(x: paddle.Tensor, cos: paddle.Tensor, sin: paddle.Tensor) -> paddle.Tensor:
    """``x`` [batch, seq, heads, head_dim], of each head as much turned by its position as the tables are wide."""
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return paddle.concat([rotate(x[..., :width], cos, sin), x[..., width:]], axis=-1)
    half = width // 2
    turned = paddle.concat([-x[..., half:], x[..., :half]], axis=-1)
    return x * cos + turned * sin
