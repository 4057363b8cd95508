"""Blocks as Layers: what moves, joins, cuts or reduces values."""

from __future__ import annotations

import math
from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F

from random_models.layers import At, Shape, Tensor, activate


class TokenMixer(nn.Layer):
    def __init__(self, at: At, shape: Shape):
        super().__init__()
        self.at, self.up, self.down = at, nn.Linear(shape[0], 16), nn.Linear(16, shape[0])

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(activate(self.up(x.transpose([0, 2, 1])), self.at["activation"])).transpose([0, 2, 1])
        return x + y if self.at["residual"] else y


class PerHeadScale(nn.Layer):
    def __init__(self, at: At, shape: Shape):
        super().__init__()
        self.heads, self.at = at["heads"], at
        self.weight = self.create_parameter([self.heads, 1], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        y = x.reshape([0, 0, self.heads, x.shape[-1] // self.heads])
        if self.at["norm"]:
            y = F.normalize(y, axis=-1)
        return (y * self.weight).reshape([0, 0, x.shape[-1]])


class Add(nn.Layer):
    def __init__(self, at: At, *_: Shape):
        super().__init__()
        self.op = at["how"]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.op == "add":
            return x + y
        return getattr(paddle, self.op)(x, y)


class Concat(nn.Layer):
    def __init__(self, *_: Any):
        super().__init__()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return paddle.concat([x, y], axis=-1)


class Append(nn.Layer):
    def __init__(self, *_: Any):
        super().__init__()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return paddle.concat([x, y], axis=1)


class Stack(nn.Layer):
    def __init__(self, at: At, shape: Shape, *_: Shape):
        super().__init__()
        self.then, self.axis, self.width = at["then"], at["axis"], shape[-1]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.then == "reshape":
            stacked = paddle.stack([x, y], axis=-2)
            return stacked.reshape([*stacked.shape[:-2], 2 * self.width])
        stacked = paddle.stack([x, y], axis=self.axis)
        if self.then == "index":
            return stacked[:, 1] if self.axis else stacked[1]
        return getattr(paddle, self.then)(stacked, axis=self.axis)


class Split(nn.Layer):
    def __init__(self, at: At, *_: Shape):
        super().__init__()
        self.parts, self.then = at["parts"], at["then"]

    def forward(self, x: Tensor) -> Tensor:
        parts = paddle.split(x, self.parts, axis=-1)
        if self.then == "first":
            return parts[0]
        if self.then == "last":
            return parts[-1]
        if self.then == "sum":
            return sum(parts[1:], parts[0])
        if self.then == "product":
            return parts[0] * parts[-1]
        return parts[0] * F.sigmoid(parts[-1])


class SwapHalves(nn.Layer):
    def __init__(self, at: At, shape: Shape):
        super().__init__()
        self.spelt, self.half = at["spelt"], shape[-1] // 2

    def forward(self, x: Tensor) -> Tensor:
        if self.spelt == "roll":
            return paddle.roll(x, self.half, axis=-1)
        if self.spelt == "slice":
            return paddle.concat([x[..., self.half :], x[..., : self.half]], axis=-1)
        first, second = paddle.split(x, 2, axis=-1)
        return paddle.concat([second, first], axis=-1)


class Slice(nn.Layer):
    def __init__(self, at: At, shape: Shape):
        super().__init__()
        self.part, self.half = at["part"], shape[-1] // 2

    def forward(self, x: Tensor) -> Tensor:
        return x[..., : self.half] if self.part == "first" else x[..., self.half :]


class Cut(nn.Layer):
    def __init__(self, at: At, shape: Shape):
        super().__init__()
        self.part, self.half = at["part"], shape[0] // 2

    def forward(self, x: Tensor) -> Tensor:
        if self.part == "strided":
            return x[:, : 2 * self.half : 2]
        return x[:, : self.half] if self.part == "first" else x[:, -self.half :]


class Broadcast(nn.Layer):
    def __init__(self, at: At, *_: Shape):
        super().__init__()
        self.op = at["how"]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        y = y.unsqueeze(1)
        return x + y if self.op == "add" else x * y


class Einsum(nn.Layer):
    def __init__(self, at: At, shape: Shape):
        super().__init__()
        self.weight = self.create_parameter([shape[-1], at["width"]])

    def forward(self, x: Tensor) -> Tensor:
        return paddle.einsum("...h,hk->...k", x, self.weight)


class Pool(nn.Layer):
    def __init__(self, at: At, shape: Shape):
        super().__init__()
        self.how = at["how"]
        if self.how == "weighted":
            self.score = nn.Linear(shape[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "first":
            return x[:, 0]
        if self.how == "last":
            return x[:, -1]
        if self.how == "weighted":
            return (F.softmax(self.score(x), axis=1) * x).sum(1)
        return getattr(x, self.how)(axis=1)


class Flatten(nn.Layer):
    def __init__(self, at: At, shape: Shape):
        super().__init__()
        self.spelt, self.size = at["spelt"], math.prod(shape)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) if self.spelt == "flatten" else x.reshape([-1, self.size])


LAYERS: dict[str, type[nn.Layer]] = {
    "add": Add,
    "append": Append,
    "broadcast": Broadcast,
    "concat": Concat,
    "cut": Cut,
    "einsum": Einsum,
    "flatten": Flatten,
    "per_head_scale": PerHeadScale,
    "pool": Pool,
    "slice": Slice,
    "split": Split,
    "stack": Stack,
    "swap_halves": SwapHalves,
    "token_mixer": TokenMixer,
}
