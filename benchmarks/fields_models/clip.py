"""CLIP ViT-B/32 (arXiv 2103.00020): towers for images and texts, and a loss over all pairs of the batch."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F


class Block(nn.Layer):
    """A transformer block with its norms in front."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        read = self.norm1(x)
        q, k, v = (p(read).reshape([0, 0, self.heads, x.shape[-1] // self.heads]) for p in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(seen.reshape([0, 0, x.shape[-1]]))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CLIP(nn.Layer):
    def __init__(self, depth: int = 12, size: int = 224, patch: int = 32, vocabulary: int = 49408, length: int = 77):
        super().__init__()
        self.patch = nn.Conv2D(3, 768, patch, patch, bias_attr=False)
        self.image_places = nn.Embedding((size // patch) ** 2, 768)
        self.images = nn.LayerList([Block(768, 12, causal=False) for _ in range(depth)])
        self.words, self.text_places = nn.Embedding(vocabulary, 512), nn.Embedding(length, 512)
        self.texts = nn.LayerList([Block(512, 8, causal=True) for _ in range(depth)])
        self.image_norm, self.text_norm = nn.LayerNorm(768), nn.LayerNorm(512)
        self.image_head, self.text_head = (nn.Linear(n, 512, bias_attr=False) for n in (768, 512))

    def forward(self, images: Any, texts: Any, labels: Any) -> Any:
        seen = self.patch(images).flatten(2).transpose([0, 2, 1])
        seen = seen + self.image_places(paddle.arange(seen.shape[1]))
        for block in self.images:
            seen = block(seen)
        read = self.words(texts) + self.text_places(paddle.arange(texts.shape[1]))
        for block in self.texts:
            read = block(read)
        image = F.normalize(self.image_head(self.image_norm(seen).mean(1)), axis=-1)
        text = F.normalize(self.text_head(self.text_norm(read)[:, -1]), axis=-1)
        pairs = paddle.matmul(image, text, transpose_y=True) * 100.0
        return (F.cross_entropy(pairs, labels) + F.cross_entropy(pairs.t(), labels)) / 2
