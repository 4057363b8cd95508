"""GPT-J: attention and feed-forward network read one norm, rotary positions of neighbours, a head of its own with a bias."""

import paddle
from paddle import nn
from paddle.nn import functional as F

from .parts import (
    HEAD,
    HEADS,
    HIDDEN,
    VOCAB,
    FeedForward,
    causal_mask,
    core,
    linear,
    merge_heads,
    rotary_tables,
    rotate_pairs,
    split_heads,
    token_loss,
)


class Block(nn.Layer):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v = (linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))
        self.out = linear(HIDDEN, HIDDEN, bias=False)
        self.ffn = FeedForward(F.gelu)

    def forward(self, x, cos, sin, mask):
        h = self.norm(x)
        query, key, value = (split_heads(p(h), HEADS) for p in (self.q, self.k, self.v))
        query, key = rotate_pairs(query, cos, sin), rotate_pairs(key, cos, sin)
        return x + self.out(merge_heads(core(query, key, value, mask))) + self.ffn(h)


class GPTJ(nn.Layer):
    def __init__(self, layers=2):
        super().__init__()
        self.words = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.LayerList([Block() for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(HIDDEN), linear(HIDDEN, VOCAB)

    def forward(self, tokens, labels):
        seq = tokens.shape[1]
        (cos, sin), mask = rotary_tables(seq, HEAD), causal_mask(seq)
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return token_loss(self.head(self.norm(x)), paddle.cast(labels, "int64"))
