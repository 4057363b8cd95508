"""BERT with both of its heads: three embeddings, norms behind, a padding mask from an input of [batch, seq]."""

import paddle
from paddle import nn
from paddle.nn import functional as F

from .parts import HEADS, HIDDEN, SEQ, VOCAB, FeedForward, core, linear, merge_heads, split_heads, token_loss


class Block(nn.Layer):
    def __init__(self, dropout):
        super().__init__()
        self.q, self.k, self.v, self.out = (linear(HIDDEN, HIDDEN) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.ffn, self.dropout = FeedForward(F.gelu), nn.Dropout(dropout)

    def forward(self, x, mask):
        context = core(*(split_heads(p(x), HEADS) for p in (self.q, self.k, self.v)), mask, self.dropout)
        x = self.norm1(x + self.dropout(self.out(merge_heads(context))))
        return self.norm2(x + self.dropout(self.ffn(x)))


class BERT(nn.Layer):
    def __init__(self, layers=2, dropout=0.0):
        super().__init__()
        self.words, self.positions, self.kinds = (nn.Embedding(n, HIDDEN) for n in (VOCAB, SEQ, 2))
        self.norm, self.dropout = nn.LayerNorm(HIDDEN), nn.Dropout(dropout)
        self.blocks = nn.LayerList([Block(dropout) for _ in range(layers)])
        self.transform, self.transform_norm = linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)
        self.word_bias = self.create_parameter([VOCAB], is_bias=True)
        self.pooler, self.next_sentence = linear(HIDDEN, HIDDEN), linear(HIDDEN, 2)

    def forward(self, tokens, kinds, mask, labels, follows):
        positions = paddle.arange(tokens.shape[1], dtype="int64").expand_as(tokens)
        x = self.words(tokens) + self.positions(positions) + self.kinds(kinds)
        x = self.dropout(self.norm(x))
        bias = (1.0 - paddle.cast(paddle.unsqueeze(mask, [1, 2]), "float32")) * -1e4
        for block in self.blocks:
            x = block(x, bias)
        h = self.transform_norm(F.gelu(self.transform(x)))
        words = paddle.matmul(h, self.words.weight, transpose_y=True) + self.word_bias
        pooled = paddle.tanh(self.pooler(x[:, 0]))
        return token_loss(words, labels) + F.cross_entropy(self.next_sentence(pooled), follows)
