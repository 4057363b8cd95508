"""BERT (arXiv 1810.04805): an encoder with norms behind its halves, a head for masked words and one for pairs of sentences."""

from __future__ import annotations

import paddle
from paddle import nn
from paddle.nn import functional as F

from paddle_rbt_plugin.models.attention import GroupedAttention
from paddle_rbt_plugin.models.decoder import token_loss
from paddle_rbt_plugin.models.feed_forward import activate, make_feed_forward
from paddle_rbt_plugin.models.norm import make_norm
from paddle_rbt_plugin.models.projection import embedding, linear
from paddle_rbt_plugin.models.transformer import EncoderConfig


class EncoderBlock(nn.Layer):
    """One transformer layer: attention and feed-forward network, each added to its input and normalised then."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.attn = GroupedAttention(config, config.attention)
        self.attn_norm, self.ffn_norm = (make_norm(config.norm, config.hidden) for _ in range(2))
        self.ffn = make_feed_forward(config, config.ffn_part)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
        x = self.attn_norm(x + self.dropout(self.attn(x, masks=(mask,))))
        return self.ffn_norm(x + self.dropout(self.ffn(x)))


class EncoderForPretraining(nn.Layer):
    """The model with both of its heads and their losses; the head of words has the weight of the embedding."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.embed_tokens = embedding(config, config.vocab, config.hidden)
        self.embed_positions = embedding(config, config.positions, config.hidden)
        self.embed_types = embedding(config, config.token_types, config.hidden)
        self.embed_norm, self.dropout = make_norm(config.norm, config.hidden), nn.Dropout(config.dropout)
        self.layers = nn.LayerList([EncoderBlock(config) for _ in range(config.layers)])
        self.activation = config.ffn_part.activation
        self.transform, self.transform_norm = (
            linear(config, config.hidden, config.hidden, True),
            make_norm(config.norm, config.hidden),
        )
        self.word_bias = self.create_parameter([config.vocab], is_bias=True)
        self.pooler = linear(config, config.hidden, config.hidden, True)
        self.next_sentence = linear(config, config.hidden, 2, True)

    def forward(
        self,
        input_ids: paddle.Tensor,
        token_type_ids: paddle.Tensor,
        attention_mask: paddle.Tensor,
        labels: paddle.Tensor,
        next_sentence_label: paddle.Tensor,
    ) -> paddle.Tensor:
        """The sum of both losses, a scalar. All inputs are [batch, seq] but the last, [batch, 1]; the mask is 0 where there is
        padding and 1 elsewhere, labels are -100 where no word is to be predicted."""
        positions = paddle.expand_as(paddle.arange(input_ids.shape[1], dtype="int64"), input_ids)
        x = self.embed_tokens(input_ids) + self.embed_positions(positions) + self.embed_types(token_type_ids)
        x = self.dropout(self.embed_norm(x))
        mask = (1.0 - paddle.cast(paddle.unsqueeze(attention_mask, [1, 2]), "float32")) * -1e9
        for layer in self.layers:
            x = layer(x, mask)
        h = self.transform_norm(activate(self.activation, self.transform(x)))
        words = paddle.matmul(h, self.embed_tokens.weight, transpose_y=True) + self.word_bias
        pooled = paddle.tanh(self.pooler(x[:, 0]))
        return token_loss(words, labels) + F.cross_entropy(self.next_sentence(pooled), next_sentence_label)
