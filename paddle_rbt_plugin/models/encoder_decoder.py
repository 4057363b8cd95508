"""T5 (arXiv 1910.10683): an encoder and a decoder that share the embedding, with learned scores by distance."""

from __future__ import annotations

import math

import paddle
from paddle import nn

from paddle_rbt_plugin.models.attention import GroupedAttention
from paddle_rbt_plugin.models.decoder import token_loss
from paddle_rbt_plugin.models.feed_forward import make_feed_forward
from paddle_rbt_plugin.models.masks import causal
from paddle_rbt_plugin.models.norm import make_norm
from paddle_rbt_plugin.models.projection import embedding, linear
from paddle_rbt_plugin.models.transformer import EncoderDecoderConfig


class StackBlock(nn.Layer):
    """One transformer layer of the encoder, or of the decoder, which reads the encoder's result as well."""

    def __init__(self, config: EncoderDecoderConfig, decodes: bool):
        super().__init__()
        self.attn_norm, self.attn = make_norm(config.norm, config.hidden), GroupedAttention(config, config.attention)
        if decodes:
            self.cross_norm, self.cross = make_norm(config.norm, config.hidden), GroupedAttention(config, config.attention)
        self.ffn_norm, self.ffn = make_norm(config.norm, config.hidden), make_feed_forward(config, config.ffn_part)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: paddle.Tensor, bias: paddle.Tensor, memory: paddle.Tensor | None = None) -> paddle.Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x), masks=(bias,)))
        if memory is not None:
            x = x + self.dropout(self.cross(self.cross_norm(x), memory=memory))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class Stack(nn.Layer):
    """All layers of the encoder, or of the decoder; the first makes the scores by distance, which all of them add."""

    def __init__(self, config: EncoderDecoderConfig, decodes: bool):
        super().__init__()
        self.config, self.decodes = config, decodes
        self.distance_scores = embedding(config, config.buckets, config.heads)
        count = config.decoder_layers if decodes else config.layers
        self.layers = nn.LayerList([StackBlock(config, decodes) for _ in range(count)])
        self.norm, self.dropout = make_norm(config.norm, config.hidden), nn.Dropout(config.dropout)

    def forward(self, x: paddle.Tensor, memory: paddle.Tensor | None = None) -> paddle.Tensor:
        seq = x.shape[1]
        bias = paddle.unsqueeze(paddle.transpose(self.distance_scores(self.buckets(seq)), [2, 0, 1]), 0)
        if self.decodes:
            bias = bias + causal(seq, 0, 0)[0]
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, bias, memory)
        return self.dropout(self.norm(x))

    def buckets(self, seq: int) -> paddle.Tensor:
        """[seq, seq]: the bucket of the distance from a query to a key. Half of the buckets are single distances, the rest grow
        with the logarithm up to ``max_distance``; an encoder has as many again for keys that follow."""
        places = paddle.arange(seq, dtype="int64")
        distance = paddle.unsqueeze(places, 0) - paddle.unsqueeze(places, 1)
        count = self.config.buckets // (1 if self.decodes else 2)
        offset = paddle.zeros_like(distance) if self.decodes else paddle.cast(distance > 0, "int64") * count
        distance = paddle.clip(-distance, min=0) if self.decodes else paddle.abs(distance)
        exact = count // 2
        ratio = paddle.log(paddle.cast(paddle.clip(distance, min=exact), "float32") / exact)
        far = exact + paddle.cast(ratio / math.log(self.config.max_distance / exact) * (count - exact), "int64")
        return offset + paddle.where(distance < exact, distance, paddle.clip(far, max=count - 1))


class EncoderDecoderForPretraining(nn.Layer):
    """The model with its head, tied to the embedding or not, and its loss."""

    def __init__(self, config: EncoderDecoderConfig):
        super().__init__()
        self.embed_tokens = embedding(config, config.vocab, config.hidden)
        self.encoder, self.decoder = Stack(config, decodes=False), Stack(config, decodes=True)
        self.tied, self.scale = config.tied, config.hidden**-0.5
        if not config.tied:
            self.lm_head = linear(config, config.hidden, config.vocab)

    def forward(self, input_ids: paddle.Tensor, decoder_input_ids: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        """The mean cross entropy, a scalar, of ``labels``; all inputs are [batch, seq]."""
        x = self.decoder(self.embed_tokens(decoder_input_ids), self.encoder(self.embed_tokens(input_ids)))
        if not self.tied:
            return token_loss(self.lm_head(x), labels)
        return token_loss(paddle.matmul(paddle.scale(x, self.scale), self.embed_tokens.weight, transpose_y=True), labels)
