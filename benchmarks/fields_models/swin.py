"""Swin-T (arXiv 2103.14030): attention in windows that every other block shifts, and patches that are merged between stages."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

WINDOW = 7


def in_windows(x: Any) -> Any:
    """[b, h, w, c] as [b h w / 49, 49, c]."""
    _, h, w, c = x.shape
    x = x.reshape([-1, h // WINDOW, WINDOW, w // WINDOW, WINDOW, c])
    return x.transpose([0, 1, 3, 2, 4, 5]).reshape([-1, WINDOW * WINDOW, c])


def back(windows: Any, h: int, w: int) -> Any:
    c = windows.shape[-1]
    x = windows.reshape([-1, h // WINDOW, w // WINDOW, WINDOW, WINDOW, c])
    return x.transpose([0, 1, 3, 2, 4, 5]).reshape([-1, h, w, c])


def relative_places() -> np.ndarray:
    """For each pair of places in a window, the row of the table of biases."""
    places = np.stack(np.meshgrid(*[np.arange(WINDOW)] * 2, indexing="ij")).reshape(2, -1)
    offsets = places[:, :, None] - places[:, None, :] + WINDOW - 1
    return (offsets[0] * (2 * WINDOW - 1) + offsets[1]).reshape(-1)


class Block(nn.Layer):
    def __init__(self, width: int, heads: int, shift: int):
        super().__init__()
        self.heads, self.shift = heads, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.biases = self.create_parameter([(2 * WINDOW - 1) ** 2, heads])
        self.register_buffer("places", paddle.to_tensor(relative_places(), dtype="int64"), persistable=True)

    def forward(self, x: Any) -> Any:
        h, w = x.shape[1:3]
        read = self.norm1(x)
        if self.shift:
            read = paddle.roll(read, [-self.shift, -self.shift], [1, 2])
        read = back(self.attend(in_windows(read)), h, w)
        if self.shift:
            read = paddle.roll(read, [self.shift, self.shift], [1, 2])
        x = x + read
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, x: Any) -> Any:
        n, c = x.shape[1:]
        q, k, v = self.qkv(x).reshape([-1, n, 3, self.heads, c // self.heads]).transpose([2, 0, 3, 1, 4]).unbind(0)
        bias = paddle.gather(self.biases, self.places).reshape([1, n, n, self.heads]).transpose([0, 3, 1, 2])
        scores = paddle.matmul(q * (c // self.heads) ** -0.5, k, transpose_y=True) + bias
        return self.out(paddle.matmul(F.softmax(scores), v).transpose([0, 2, 1, 3]).reshape([-1, n, c]))


class Merge(nn.Layer):
    """Four neighbouring patches as one of twice the width."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.reduce = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias_attr=False)

    def forward(self, x: Any) -> Any:
        _, h, w, c = x.shape
        x = x.reshape([-1, h // 2, 2, w // 2, 2, c]).transpose([0, 1, 3, 4, 2, 5]).reshape([-1, h // 2, w // 2, 4 * c])
        return self.reduce(self.norm(x))


class Swin(nn.Layer):
    def __init__(self, width: int = 96, depths: tuple[int, ...] = (2, 2, 6, 2), classes: int = 1000):
        super().__init__()
        self.patch, self.norm = nn.Conv2D(3, width, 4, 4), nn.LayerNorm(width)
        layers: list[nn.Layer] = []
        for stage, depth in enumerate(depths):
            n = width * 2**stage
            layers += [Merge(n // 2)] if stage else []
            # The windows of the last stage are all of the image, which nothing shifts.
            shifted = WINDOW // 2 if stage < len(depths) - 1 else 0
            layers += [Block(n, n // 32, shifted * (i % 2)) for i in range(depth)]
        self.layers = nn.LayerList(layers)
        self.last, self.head = nn.LayerNorm(n), nn.Linear(n, classes)

    def forward(self, images: Any) -> Any:
        x = self.norm(self.patch(images).transpose([0, 2, 3, 1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(x).mean([1, 2]))
