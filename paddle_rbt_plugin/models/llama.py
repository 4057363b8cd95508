"""LLaMA in Paddle's public API (arXiv 2302.13971), grouped keys and values included (arXiv 2307.09288).

The norm and the gate are written out, since the fused kernels are missing from CPU wheels, where models must trace too.
"""

from __future__ import annotations

import paddle
from paddle import nn
from paddle.nn import functional as F

from paddle_rbt_plugin.models.config import LlamaConfig
from paddle_rbt_plugin.models.rotary import rotary_tables, rotate


class LlamaRMSNorm(nn.Layer):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467)."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.weight = self.create_parameter([config.hidden], default_initializer=nn.initializer.Constant(1.0))
        self.eps = config.norm_eps

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        variance = paddle.mean(paddle.pow(x, 2), axis=-1, keepdim=True)
        return x * paddle.rsqrt(variance + self.eps) * self.weight


class LlamaAttention(nn.Layer):
    """Self-attention with rotary positions, in which several query heads share a head of keys and values."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.hidden = config.hidden
        self.q_proj = _linear(config, config.hidden, config.hidden)
        self.k_proj = _linear(config, config.hidden, config.kv_heads * config.head_dim)
        self.v_proj = _linear(config, config.hidden, config.kv_heads * config.head_dim)
        self.o_proj = _linear(config, config.hidden, config.hidden)

    def forward(self, x: paddle.Tensor, cos: paddle.Tensor, sin: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
        """``x`` is [batch, seq, hidden], ``cos`` and ``sin`` are [1, seq, 1, head_dim], ``mask`` is [seq, seq]."""
        query = rotate(paddle.reshape(self.q_proj(x), [0, 0, self.heads, self.head_dim]), cos, sin)
        key = rotate(paddle.reshape(self.k_proj(x), [0, 0, self.kv_heads, self.head_dim]), cos, sin)
        value = paddle.reshape(self.v_proj(x), [0, 0, self.kv_heads, self.head_dim])
        query = paddle.transpose(query, [0, 2, 1, 3])
        key = paddle.transpose(self.share(key), [0, 2, 1, 3])
        value = paddle.transpose(self.share(value), [0, 2, 1, 3])
        scores = paddle.scale(paddle.matmul(query, key, transpose_y=True), self.head_dim**-0.5)
        context = paddle.transpose(paddle.matmul(F.softmax(scores + mask), value), [0, 2, 1, 3])
        return self.o_proj(paddle.reshape(context, [0, 0, self.hidden]))

    def share(self, x: paddle.Tensor) -> paddle.Tensor:
        """[batch, seq, kv_heads, head_dim] to [batch, seq, heads, head_dim]: each head as often as queries use it."""
        if self.kv_heads == self.heads:
            return x
        copies = paddle.tile(paddle.unsqueeze(x, 3), [1, 1, 1, self.heads // self.kv_heads, 1])
        return paddle.reshape(copies, [0, 0, self.heads, self.head_dim])


class LlamaFeedForward(nn.Layer):
    """down(silu(gate(x)) * up(x)) (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = _linear(config, config.hidden, config.ffn)
        self.up_proj = _linear(config, config.hidden, config.ffn)
        self.down_proj = _linear(config, config.ffn, config.hidden)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Layer):
    """One transformer layer: attention and feed-forward network, each normalised before and added to its input."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.attn_norm = LlamaRMSNorm(config)
        self.attn = LlamaAttention(config)
        self.ffn_norm = LlamaRMSNorm(config)
        self.ffn = LlamaFeedForward(config)

    def forward(self, x: paddle.Tensor, cos: paddle.Tensor, sin: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin, mask)
        return x + self.ffn(self.ffn_norm(x))


class LlamaModel(nn.Layer):
    """Embedding, blocks and the final norm. The rotary tables and the causal mask are made once, for all blocks."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim, self.rope_theta = config.head_dim, config.rope_theta
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden, weight_attr=_normal(config))
        self.layers = nn.LayerList([LlamaBlock(config) for _ in range(config.layers)])
        self.norm = LlamaRMSNorm(config)

    def forward(self, input_ids: paddle.Tensor) -> paddle.Tensor:
        """Hidden states [batch, seq, hidden] of ``input_ids`` [batch, seq]."""
        x = self.embed_tokens(input_ids)
        seq = input_ids.shape[1]
        cos, sin = rotary_tables(seq, self.head_dim, self.rope_theta)
        mask = paddle.triu(paddle.full([seq, seq], -1e9, dtype=x.dtype), diagonal=1)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)


class LlamaForPretraining(nn.Layer):
    """The model with its own head and its loss."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.llama = LlamaModel(config)
        self.lm_head = _linear(config, config.hidden, config.vocab)

    def forward(self, input_ids: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        """The mean cross entropy, a scalar, of ``labels``, the next tokens; both inputs are [batch, seq]."""
        logits = self.lm_head(self.llama(input_ids))
        return paddle.mean(F.cross_entropy(logits, paddle.unsqueeze(labels, 2), reduction="none"))


def _linear(config: LlamaConfig, width_in: int, width_out: int) -> nn.Linear:
    return nn.Linear(width_in, width_out, weight_attr=_normal(config), bias_attr=False)


def _normal(config: LlamaConfig) -> paddle.ParamAttr:
    return paddle.ParamAttr(initializer=nn.initializer.Normal(0.0, config.init_std))
