"""Decoders that predict the next token, of whatever parts (``models.transformer``)."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import nn
from paddle.nn import functional as F

from paddle_rbt_plugin.models.attention import GroupedAttention, Tables
from paddle_rbt_plugin.models.experts import Mixture
from paddle_rbt_plugin.models.feed_forward import make_feed_forward
from paddle_rbt_plugin.models.latent import LatentAttention
from paddle_rbt_plugin.models.masks import banded, block_of, causal
from paddle_rbt_plugin.models.norm import make_norm
from paddle_rbt_plugin.models.projection import embedding, linear
from paddle_rbt_plugin.models.rotary import rotary_tables
from paddle_rbt_plugin.models.transformer import DecoderConfig, Heads


class DecoderBlock(nn.Layer):
    """One transformer layer: attention and feed-forward network or experts, each normalised before and added to its input."""

    def __init__(self, config: DecoderConfig, window: int, sparse: bool):
        super().__init__()
        self.attn_norm = make_norm(config.norm, config.hidden)
        block = block_of(config.seq, window)
        if isinstance(config.attention, Heads):
            self.attn = GroupedAttention(config, config.attention, block)
        else:
            self.attn = LatentAttention(config, config.attention, block)
        self.ffn_norm = make_norm(config.norm, config.hidden)
        self.ffn = Mixture(config, config.experts) if sparse and config.experts else make_feed_forward(config, config.ffn_part)
        self.norm_after = config.norm_after
        if config.norm_after:
            self.attn_out_norm, self.ffn_out_norm = (make_norm(config.norm, config.hidden) for _ in range(2))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: paddle.Tensor, tables: Tables | None, masks: Sequence[paddle.Tensor]) -> paddle.Tensor:
        h = self.attn(self.attn_norm(x), tables, masks)
        x = x + self.dropout(self.attn_out_norm(h) if self.norm_after else h)
        h = self.ffn(self.ffn_norm(x))
        return x + self.dropout(self.ffn_out_norm(h) if self.norm_after else h)


class DecoderModel(nn.Layer):
    """Embeddings, blocks and the final norm. Rotary tables and masks are made once for all layers with the same window."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = embedding(config, config.vocab, config.hidden)
        if config.positions:
            self.embed_positions = embedding(config, config.positions, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.LayerList([DecoderBlock(config, window, sparse) for window, sparse in config.kinds()])
        self.windows = [window for window, _ in config.kinds()]
        self.norm = make_norm(config.norm, config.hidden)

    def forward(self, input_ids: paddle.Tensor) -> paddle.Tensor:
        """Hidden states [batch, seq, hidden] of ``input_ids`` [batch, seq]."""
        x = self.embed_tokens(input_ids)
        if self.config.embedding_scale != 1.0:
            x = paddle.scale(x, self.config.embedding_scale)
        if self.config.positions:
            x = self.dropout(x + self.embed_positions(paddle.arange(self.config.seq)))
        shared = {window: (self.tables(window), self.masks(window)) for window in dict.fromkeys(self.windows)}
        for i, layer in enumerate(self.layers):
            x = layer(x, *shared[self.windows[i]])
        return self.norm(x)

    def tables(self, window: int) -> Tables | None:
        """The rotary tables of layers with a window, or without one (0)."""
        if self.config.positions:
            return None
        theta = self.config.window_rope_theta if window and self.config.window_rope_theta else self.config.rope_theta
        return rotary_tables(self.config.seq, self.config.attention.rotary_dim, theta)

    def masks(self, window: int) -> tuple[paddle.Tensor, ...]:
        """What is added to the scores of layers with a window, or without one (0)."""
        attention = self.config.attention
        extra = int(isinstance(attention, Heads) and attention.sinks)
        make = banded if block_of(self.config.seq, window) else causal
        return make(self.config.seq, window, extra)


class DecoderForPretraining(nn.Layer):
    """The model with its head and its loss."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.model = DecoderModel(config)
        self.tied, self.scale, self.softcap = config.tied, config.logit_scale, config.logit_softcap
        if not config.tied:
            self.lm_head = linear(config, config.hidden, config.vocab)

    def forward(self, input_ids: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        """The mean cross entropy, a scalar, of ``labels``, the next tokens; both inputs are [batch, seq]."""
        h = self.model(input_ids)
        logits = paddle.matmul(h, self.model.embed_tokens.weight, transpose_y=True) if self.tied else self.lm_head(h)
        if self.scale != 1.0:
            logits = paddle.scale(logits, self.scale)
        if self.softcap:
            logits = paddle.scale(paddle.tanh(paddle.scale(logits, 1 / self.softcap)), self.softcap)
        return token_loss(logits, labels)


def token_loss(logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
    """The mean cross entropy of [batch, seq, vocab] and [batch, seq], a scalar."""
    return paddle.mean(F.cross_entropy(logits, paddle.unsqueeze(labels, 2), reduction="none"))
