"""T5: encoder and decoder, a position bias that all layers share, no biases, no scaling, RMSNorm, a tied embedding."""

import paddle
from paddle import nn
from paddle.nn import functional as F

from .parts import (
    HEADS,
    HIDDEN,
    VOCAB,
    FeedForward,
    GatedFeedForward,
    RMSNorm,
    causal_mask,
    core,
    linear,
    merge_heads,
    split_heads,
    token_loss,
)

BUCKETS = 8


class Attention(nn.Layer):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x, memory, bias):
        query, key, value = (split_heads(p(h), HEADS) for p, h in ((self.q, x), (self.k, memory), (self.v, memory)))
        return self.out(merge_heads(core(query, key, value, bias, scale=False)))


class Block(nn.Layer):
    def __init__(self, decodes, gated):
        super().__init__()
        self.norm1, self.attention = RMSNorm(), Attention()
        if decodes:
            self.norm2, self.cross = RMSNorm(), Attention()
        self.norm3 = RMSNorm()
        self.ffn = GatedFeedForward(F.gelu) if gated else FeedForward(F.relu, bias=False)

    def forward(self, x, bias, memory=None):
        h = self.norm1(x)
        x = x + self.attention(h, h, bias)
        if memory is not None:
            x = x + self.cross(self.norm2(x), memory, None)
        return x + self.ffn(self.norm3(x))


class Stack(nn.Layer):
    def __init__(self, layers, decodes, gated):
        super().__init__()
        self.decodes = decodes
        self.position_bias = nn.Embedding(2 * BUCKETS, HEADS)
        self.blocks = nn.LayerList([Block(decodes, gated) for _ in range(layers)])
        self.norm = RMSNorm()

    def forward(self, x, memory=None):
        seq = x.shape[1]
        places = paddle.arange(seq)
        distance = paddle.clip(places.unsqueeze(0) - places.unsqueeze(1), -BUCKETS, BUCKETS - 1) + BUCKETS
        bias = paddle.transpose(self.position_bias(distance), [2, 0, 1]).unsqueeze(0)
        if self.decodes:
            bias = bias + causal_mask(seq)
        for block in self.blocks:
            x = block(x, bias, memory)
        return self.norm(x)


class T5(nn.Layer):
    def __init__(self, layers=2, gated=False):
        super().__init__()
        self.words = nn.Embedding(VOCAB, HIDDEN)
        self.encoder, self.decoder = Stack(layers, False, gated), Stack(layers, True, gated)

    def forward(self, source, target, labels):
        x = self.decoder(self.words(target), self.encoder(self.words(source)))
        return token_loss(paddle.matmul(x * HIDDEN**-0.5, self.words.weight, transpose_y=True), labels)
