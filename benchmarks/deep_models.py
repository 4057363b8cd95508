"""Models for the speed of planning, as a package would give them: ``deep_models:distinct`` and ``deep_models:decoder``."""

from __future__ import annotations

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.static import InputSpec

DISTINCT_LAYERS = 230
DECODER_LAYERS = 34


class Feedforward(nn.Layer):
    """A residual block of a width of its own."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, width)
        self.down = nn.Linear(width, hidden)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Distinct(nn.Layer):
    """Blocks of which no two are alike."""

    def __init__(self, layers: int, hidden: int = 256):
        super().__init__()
        self.blocks = nn.LayerList([Feedforward(hidden, 512 + 8 * i) for i in range(layers)])
        self.head = nn.Linear(hidden, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


class Block(nn.Layer):
    """A decoder block that spells attention out."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        batch, length, _ = x.shape
        normed = self.norm1(x)
        q, k, v = (
            p(normed).reshape([batch, length, self.heads, self.size]).transpose([0, 2, 1, 3]) for p in (self.q, self.k, self.v)
        )
        weights = F.softmax(paddle.matmul(q, k, transpose_y=True) * self.size**-0.5)
        read = paddle.matmul(weights, v).transpose([0, 2, 1, 3]).reshape([batch, length, self.heads * self.size])
        x = x + self.o(read)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Layer):
    """Embedding, blocks and a loss over the vocabulary."""

    def __init__(self, layers: int, hidden: int = 2048, heads: int = 16, vocab: int = 32000):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.blocks = nn.LayerList([Block(hidden, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab)

    def forward(self, tokens: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)), labels.unsqueeze(-1)).mean()


def distinct():
    """230 layers, every one of another width."""
    return Distinct(DISTINCT_LAYERS), [InputSpec([None, 128, 256], "float32", "x")]


def decoder():
    """A decoder of 34 layers."""
    spec = [InputSpec([None, 1024], "int64", name) for name in ("tokens", "labels")]
    return Decoder(DECODER_LAYERS), spec
