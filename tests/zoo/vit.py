"""ViT as timm writes it: patches by convolution, a class token, one weight for query, key and value, [3, heads, d]."""

import paddle
from paddle import nn
from paddle.nn import functional as F

from .parts import HEADS, HIDDEN, FeedForward, core, linear, merge_heads

IMAGE, PATCH, CLASSES = 16, 4, 16


class Block(nn.Layer):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = linear(HIDDEN, 3 * HIDDEN), linear(HIDDEN, HIDDEN)
        self.ffn = FeedForward(F.gelu)

    def forward(self, x):
        qkv = paddle.reshape(self.qkv(self.norm1(x)), [0, 0, 3, HEADS, -1])
        x = x + self.out(merge_heads(core(*paddle.unbind(qkv, axis=2))))
        return x + self.ffn(self.norm2(x))


class ViT(nn.Layer):
    def __init__(self, layers=2):
        super().__init__()
        self.patches = nn.Conv2D(3, HIDDEN, PATCH, PATCH)
        self.class_token = self.create_parameter([1, 1, HIDDEN])
        self.positions = self.create_parameter([1, 1 + (IMAGE // PATCH) ** 2, HIDDEN])
        self.blocks = nn.LayerList([Block() for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(HIDDEN), linear(HIDDEN, CLASSES)

    def forward(self, images, labels):
        x = paddle.transpose(paddle.flatten(self.patches(images), 2), [0, 2, 1])
        token = paddle.expand(self.class_token, [x.shape[0], 1, HIDDEN])
        x = paddle.concat([token, x], axis=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), labels)
