"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import nn

from paddle_rbt_plugin.models.attention import Core, Tables
from paddle_rbt_plugin.models.norm import RMSNorm
from paddle_rbt_plugin.models.projection import linear
from paddle_rbt_plugin.models.rotary import rotate
from paddle_rbt_plugin.models.transformer import Latent, Transformer


class LatentAttention(nn.Layer):
    """Self-attention whose keys and values, and perhaps queries, are projected from narrow vectors."""

    def __init__(self, config: Transformer, latent: Latent, block: int = 0):
        super().__init__()
        self.latent = latent
        heads, hidden = latent.heads, config.hidden
        if latent.query_rank:
            self.q_a_proj = linear(config, hidden, latent.query_rank, latent.bias)
            self.q_a_norm = RMSNorm(latent.query_rank, config.norm.eps)
        self.q_b_proj = linear(config, latent.query_rank or hidden, heads * latent.head_dim)
        self.kv_a_proj = linear(config, hidden, latent.kv_rank + latent.rotary_dim, latent.bias)
        self.kv_a_norm = RMSNorm(latent.kv_rank, config.norm.eps)
        self.kv_b_proj = linear(config, latent.kv_rank, heads * (latent.plain_dim + latent.value_dim))
        self.o_proj = linear(config, heads * latent.value_dim, hidden, latent.bias)
        self.core = Core(latent.head_dim**-0.5, config.attention_dropout, block=block)

    def forward(self, x: paddle.Tensor, tables: Tables | None = None, masks: Sequence[paddle.Tensor] = ()) -> paddle.Tensor:
        """``x`` is [batch, seq, hidden]; the tables are as wide as the rotated part of a head."""
        latent, heads = self.latent, self.latent.heads
        narrow = self.q_a_norm(self.q_a_proj(x)) if latent.query_rank else x
        query = paddle.reshape(self.q_b_proj(narrow), [0, 0, heads, latent.head_dim])
        both = self.kv_a_proj(x)
        kv = self.kv_b_proj(self.kv_a_norm(both[..., : latent.kv_rank]))
        kv = paddle.reshape(kv, [0, 0, heads, latent.plain_dim + latent.value_dim])
        shared = paddle.unsqueeze(both[..., latent.kv_rank :], 2)
        rotated = query[..., latent.plain_dim :]
        if tables is not None:
            rotated, shared = rotate(rotated, *tables), rotate(shared, *tables)
        query = paddle.concat([query[..., : latent.plain_dim], rotated], axis=-1)
        key = paddle.concat([kv[..., : latent.plain_dim], paddle.tile(shared, [1, 1, heads, 1])], axis=-1)
        return self.o_proj(self.core(query, key, kv[..., latent.plain_dim :], masks, None))
