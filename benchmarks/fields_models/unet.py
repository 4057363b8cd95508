"""UNet (arXiv 1505.04597) with batch norms and padded convolutions, as it is trained today: images to a class per pixel."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F


class Double(nn.Layer):
    """Two convolutions."""

    def __init__(self, read: int, made: int):
        super().__init__()
        self.first, self.second = (nn.Conv2D(n, made, 3, padding=1, bias_attr=False) for n in (read, made))
        self.norms = nn.LayerList([nn.BatchNorm2D(made) for _ in range(2)])

    def forward(self, x: Any) -> Any:
        return F.relu(self.norms[1](self.second(F.relu(self.norms[0](self.first(x))))))


class UNet(nn.Layer):
    def __init__(self, width: int = 64, depth: int = 4, classes: int = 2):
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.down = nn.LayerList([Double(n, m) for n, m in pairwise([3, *widths])])
        self.up = nn.LayerList([nn.Conv2DTranspose(2 * n, n, 2, 2) for n in widths[-2::-1]])
        self.joined = nn.LayerList([Double(2 * n, n) for n in widths[-2::-1]])
        self.head = nn.Conv2D(width, classes, 1)

    def forward(self, images: Any) -> Any:
        seen = [self.down[0](images)]
        for block in self.down[1:]:
            seen.append(block(F.max_pool2d(seen[-1], 2)))
        x = seen.pop()
        for up, block in zip(self.up, self.joined, strict=True):
            x = block(paddle.concat([seen.pop(), up(x)], axis=1))
        return self.head(x).transpose([0, 2, 3, 1])
