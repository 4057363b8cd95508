"""GPT-2 as Megatron-LM writes it: one weight for query, key and value, [heads, 3, d]; positions counted in the program, shapes
read by ``paddle.shape`` as for exported models."""

import paddle
from paddle import nn
from paddle.nn import functional as F

from .parts import HEADS, HIDDEN, SEQ, VOCAB, FeedForward, causal_mask, core, linear, merge_heads, token_loss


class Block(nn.Layer):
    def __init__(self, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = linear(HIDDEN, 3 * HIDDEN), linear(HIDDEN, HIDDEN)
        self.ffn = FeedForward(lambda x: F.gelu(x, approximate=True), dropout=dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask):
        shape = paddle.shape(x)
        qkv = paddle.reshape(self.qkv(self.norm1(x)), [shape[0], shape[1], HEADS, -1])
        context = core(*paddle.split(qkv, 3, axis=-1), mask, self.dropout)
        x = x + self.dropout(self.out(merge_heads(context)))
        return x + self.dropout(self.ffn(self.norm2(x)))


class GPT2(nn.Layer):
    def __init__(self, layers=2, dropout=0.0):
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQ, HIDDEN)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.LayerList([Block(dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens, labels):
        seq = tokens.shape[1]
        x = self.dropout(self.words(tokens) + self.positions(paddle.arange(seq).unsqueeze(0)))
        mask = causal_mask(seq)
        for block in self.blocks:
            x = block(x, mask)
        logits = paddle.matmul(self.norm(x), self.words.weight, transpose_y=True)
        return token_loss(logits, labels)
