"""Parts that several models of the zoo are made of, in the spellings that models in the wild use."""

from __future__ import annotations

import paddle
from paddle import nn
from paddle.nn import functional as F

HIDDEN, FFN, HEADS, VOCAB, SEQ = 64, 128, 8, 128, 16
HEAD = HIDDEN // HEADS


def linear(width_in, width_out, bias=True):
    return nn.Linear(width_in, width_out, bias_attr=None if bias else False)


def split_heads(x, heads):
    """[batch, seq, heads * d] to [batch, seq, heads, d]."""
    return paddle.reshape(x, [0, 0, heads, -1])


def merge_heads(x):
    """[batch, seq, heads, d] to [batch, seq, heads * d]."""
    return paddle.reshape(x, [0, 0, -1])


def core(query, key, value, bias=None, dropout=None, scale=True):
    """Attention as matmul, softmax and matmul; arguments and result are [batch, seq, heads, d]."""
    query, key, value = (paddle.transpose(x, [0, 2, 1, 3]) for x in (query, key, value))
    scores = paddle.matmul(query, key, transpose_y=True)
    if scale:
        scores = scores * query.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    weights = F.softmax(scores)
    if dropout is not None:
        weights = dropout(weights)
    return paddle.transpose(paddle.matmul(weights, value), [0, 2, 1, 3])


def causal_mask(seq):
    return paddle.triu(paddle.full([seq, seq], -1e9, dtype="float32"), diagonal=1)


def token_loss(logits, labels):
    """Mean cross entropy of [batch, seq, vocabulary] and [batch, seq]."""
    return paddle.mean(F.cross_entropy(paddle.cast(logits, "float32"), paddle.unsqueeze(labels, 2), reduction="none"))


class RMSNorm(nn.Layer):
    """Written out, in float32 as models with mixed precision do it."""

    def __init__(self, width=HIDDEN):
        super().__init__()
        self.weight = self.create_parameter([width], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x):
        h = x.astype("float32")
        h = h * paddle.rsqrt(paddle.mean(paddle.square(h), axis=-1, keepdim=True) + 1e-6)
        return self.weight * h.astype(x.dtype)


class FeedForward(nn.Layer):
    """act(x W1 + b1) W2 + b2"""

    def __init__(self, activation, bias=True, dropout=0.0):
        super().__init__()
        self.activation = activation
        self.up, self.down = linear(HIDDEN, FFN, bias), linear(FFN, HIDDEN, bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.down(self.dropout(self.activation(self.up(x))))


class GatedFeedForward(nn.Layer):
    """(act(x Wg) * (x Wu)) Wd with weights of their own, or with one weight for gate and up."""

    def __init__(self, activation, fused=False):
        super().__init__()
        self.activation, self.fused = activation, fused
        if fused:
            self.gate_up = linear(HIDDEN, 2 * FFN, bias=False)
        else:
            self.gate, self.up = linear(HIDDEN, FFN, bias=False), linear(HIDDEN, FFN, bias=False)
        self.down = linear(FFN, HIDDEN, bias=False)

    def forward(self, x):
        if self.fused:
            gate, up = paddle.chunk(self.gate_up(x), 2, axis=-1)
        else:
            gate, up = self.gate(x), self.up(x)
        return self.down(self.activation(gate) * up)


def rotary_tables(seq, width, theta=10000.0):
    """Cosine and sine of [1, seq, 1, width], the frequencies twice."""
    exponents = paddle.arange(0, width, 2, dtype="float32") / width
    angles = paddle.outer(paddle.arange(seq, dtype="float32"), theta**-exponents)
    angles = paddle.concat([angles, angles], axis=-1).unsqueeze(0).unsqueeze(2)
    return paddle.cos(angles), paddle.sin(angles)


def rotate_half(x, cos, sin):
    """LLaMA: the halves of a head are the two coordinates."""
    first, second = paddle.chunk(x, 2, axis=-1)
    return x * cos + paddle.concat([-second, first], axis=-1) * sin


def rotate_pairs(x, cos, sin):
    """GPT-J: neighbours are the two coordinates."""
    even, odd = x[..., ::2], x[..., 1::2]
    turned = paddle.stack([-odd, even], axis=-1).reshape(x.shape)
    return x * cos + turned * sin
