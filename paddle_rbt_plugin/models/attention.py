"""Attention with grouped heads, and the core that all kinds of attention share."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import nn
from paddle.nn import functional as F

from paddle_rbt_plugin.models.norm import RMSNorm
from paddle_rbt_plugin.models.projection import linear, normal
from paddle_rbt_plugin.models.rotary import rotate
from paddle_rbt_plugin.models.transformer import Heads, Transformer

Tables = tuple[paddle.Tensor, paddle.Tensor]
"""Cosine and sine of rotary positions."""


class Core(nn.Layer):
    """softmax(q k^T scale + masks) v of [batch, seq, heads, dim], keys and values perhaps with fewer heads.

    With a ``block`` the sequence is cut, and each block reads itself and the one before it (``models.masks``)."""

    def __init__(self, scale: float, dropout: float = 0.0, softcap: float = 0.0, block: int = 0):
        super().__init__()
        self.scale, self.softcap, self.block = scale, softcap, block
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        query: paddle.Tensor,
        key: paddle.Tensor,
        value: paddle.Tensor,
        masks: Sequence[paddle.Tensor],
        sink: paddle.Tensor | None,
    ) -> paddle.Tensor:
        """The context, [batch, seq, heads x dim]. ``sink`` [heads, 1, 1] is the score of one more key, whose value is zero."""
        seq, heads = query.shape[1:3]
        key, value = share(key, heads), share(value, heads)
        if self.block:
            query = paddle.reshape(query, [0, seq // self.block, self.block, heads, query.shape[-1]])
            key, value = self.with_previous(key), self.with_previous(value)
        if sink is not None:
            key, value = with_zero(key), with_zero(value)
        order = [0, 2, 1, 3] if not self.block else [0, 1, 3, 2, 4]
        query, key, value = (paddle.transpose(x, order) for x in (query, key, value))
        scores = paddle.matmul(query, key, transpose_y=True)
        if self.scale != 1.0:
            scores = paddle.scale(scores, self.scale)
        if self.softcap:
            scores = paddle.scale(paddle.tanh(paddle.scale(scores, 1 / self.softcap)), self.softcap)
        for mask in masks:
            scores = scores + mask
        if sink is not None:
            scores = scores + paddle.concat([paddle.zeros([heads, 1, key.shape[-2] - 1]), sink], axis=-1)
        context = paddle.transpose(paddle.matmul(self.dropout(F.softmax(scores)), value), order)
        return paddle.reshape(context, [0, seq, heads * value.shape[-1]])

    def with_previous(self, x: paddle.Tensor) -> paddle.Tensor:
        """[batch, seq, heads, dim] to [batch, blocks, 2 x block, heads, dim]: of each block the one before it, zeros before the
        first, and itself."""
        batch, seq, heads, dim = x.shape
        blocks = paddle.reshape(x, [0, seq // self.block, self.block, heads, dim])
        previous = paddle.concat([paddle.zeros([batch, 1, self.block, heads, dim], x.dtype), blocks[:, :-1]], axis=1)
        return paddle.concat([previous, blocks], axis=2)


class GroupedAttention(nn.Layer):
    """Self-attention, or attention to ``memory``, in which several heads of queries share a head of keys and values."""

    def __init__(self, config: Transformer, heads: Heads, block: int = 0):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads.heads, heads.kv_heads, heads.head_dim
        width, kv_width = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
        self.q_proj = linear(config, config.hidden, width, heads.qkv_bias)
        self.k_proj = linear(config, config.hidden, kv_width, heads.qkv_bias)
        self.v_proj = linear(config, config.hidden, kv_width, heads.qkv_bias)
        self.o_proj = linear(config, width, config.hidden, heads.out_bias)
        self.normed = heads.qk_norm
        if heads.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(heads.head_dim, config.norm.eps, config.norm.plus_one) for _ in range(2))
        self.sinks = self.create_parameter([heads.heads, 1, 1], attr=normal(config)) if heads.sinks else None
        self.core = Core(heads.scale, config.attention_dropout, heads.softcap, block)

    def forward(
        self,
        x: paddle.Tensor,
        tables: Tables | None = None,
        masks: Sequence[paddle.Tensor] = (),
        memory: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        """``x`` is [batch, seq, hidden], and so is ``memory``."""
        source = x if memory is None else memory
        query = paddle.reshape(self.q_proj(x), [0, 0, self.heads, self.head_dim])
        key = paddle.reshape(self.k_proj(source), [0, 0, self.kv_heads, self.head_dim])
        value = paddle.reshape(self.v_proj(source), [0, 0, self.kv_heads, self.head_dim])
        if self.normed:
            query, key = self.q_norm(query), self.k_norm(key)
        if tables is not None:
            query, key = rotate(query, *tables), rotate(key, *tables)
        return self.o_proj(self.core(query, key, value, masks, self.sinks))


def share(x: paddle.Tensor, heads: int) -> paddle.Tensor:
    """[batch, seq, kv_heads, dim] to [batch, seq, heads, dim]: each head as often as queries use it."""
    kv_heads, dim = x.shape[2:]
    if kv_heads == heads:
        return x
    copies = paddle.tile(paddle.unsqueeze(x, 3), [1, 1, 1, heads // kv_heads, 1])
    return paddle.reshape(copies, [0, 0, heads, dim])


def with_zero(x: paddle.Tensor) -> paddle.Tensor:
    """Keys or values, [..., seq, heads, dim], and behind them one that is zero."""
    return paddle.concat([x, paddle.zeros([*x.shape[:-3], 1, *x.shape[-2:]], x.dtype)], axis=-3)
