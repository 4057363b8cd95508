"""Blocks as Layers: embeddings, maps of the last dimension, norms, images."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F

Shape = tuple[int, ...]
At = dict[str, Any]
Tensor = paddle.Tensor


def activate(x: Tensor, name: str) -> Tensor:
    if name == "gelu_tanh":
        return F.gelu(x, approximate=True)
    return x if name == "none" else getattr(F, name)(x)


class Linear(nn.Layer):
    def __init__(self, at: At, shape: Shape, *_: Shape):
        super().__init__()
        self.spelt, self.activation, width = at["spelt"], at.get("activation", "none"), at["width"]
        if self.spelt in ("layer", "functional"):
            self.map = nn.Linear(shape[-1], width, bias_attr=None if at["bias"] else False)
        else:
            size = [width, shape[-1]] if self.spelt == "transposed" else [shape[-1], width]
            self.weight = self.create_parameter(size)
            self.bias = self.create_parameter([width], is_bias=True) if at["bias"] else None

    def forward(self, x: Tensor) -> Tensor:
        if self.spelt == "layer":
            y = self.map(x)
        elif self.spelt == "functional":
            y = F.linear(x, self.map.weight, self.map.bias)
        else:
            y = paddle.matmul(x, self.weight, transpose_y=self.spelt == "transposed")
            y = y if self.bias is None else y + self.bias
        return activate(y, self.activation)


class TiedHead(nn.Layer):
    """Reads the table of an embedding, which the model hands it."""

    def __init__(self, at: At, *_: Shape):
        super().__init__()
        self.spelt = at["spelt"]

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        if self.spelt == "matmul":
            return paddle.matmul(x, table, transpose_y=True)
        return F.linear(x, table.t())


class Embedding(nn.Layer):
    def __init__(self, at: At, shape: Shape, words: int):
        super().__init__()
        self.at, self.length, width = at, shape[0], at["width"]
        self.padding = 0 if at["padding_idx"] else None
        self.words = nn.Embedding(words, width, padding_idx=self.padding)
        if at["positions"] == "parameter":
            self.positions = self.create_parameter([1, self.length, width])
        elif at["positions"] != "none":
            self.positions = nn.Embedding(2 * self.length, width)
        if at["types"]:
            self.types = nn.Embedding(2, width)

    @property
    def table(self) -> Tensor:
        return self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        layer = self.at["spelt"] == "layer"
        x = self.words(ids) if layer else F.embedding(ids, self.table, padding_idx=self.padding)
        if self.at["scale"] != 1:
            x = x * self.at["scale"]
        if self.at["positions"] == "arange":
            x = x + self.positions(paddle.arange(self.length))
        elif self.at["positions"] == "slice":
            x = x + self.positions.weight[: self.length]
        elif self.at["positions"] == "parameter":
            x = x + self.positions
        if self.at["types"]:
            x = x + self.types(paddle.zeros_like(ids))
        return x


class PatchEmbedding(nn.Layer):
    def __init__(self, at: At, shape: Shape):
        super().__init__()
        width, count = at["width"], (shape[1] // at["patch"]) ** 2 + int(at["class_token"])
        self.patches = nn.Conv2D(shape[0], width, at["patch"], stride=at["patch"])
        self.token = self.create_parameter([1, 1, width]) if at["class_token"] else None
        self.positions = self.create_parameter([1, count, width]) if at["positions"] else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose([0, 2, 1])
        if self.token is not None:
            x = paddle.concat([self.token.expand([x.shape[0], -1, -1]), x], axis=1)
        return x if self.positions is None else x + self.positions


class LayerNorm(nn.Layer):
    def __init__(self, at: At, shape: Shape):
        super().__init__()
        self.spelt, width = at["spelt"], shape[-1]
        self.width = width
        if self.spelt == "layer":
            self.norm = nn.LayerNorm(width)
        elif self.spelt != "plain":
            self.weight = self.create_parameter([width], default_initializer=nn.initializer.Constant(1.0))
            self.bias = None if self.spelt == "no_bias" else self.create_parameter([width], is_bias=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.spelt == "layer":
            return self.norm(x)
        if self.spelt == "plain":
            return F.layer_norm(x, [self.width])
        if self.spelt != "composed":
            return F.layer_norm(x, [self.width], self.weight, self.bias)
        centred = x - x.mean(-1, keepdim=True)
        variance = (centred * centred).mean(-1, keepdim=True)
        return centred / paddle.sqrt(variance + 1e-5) * self.weight + self.bias


class RMSNorm(nn.Layer):
    def __init__(self, at: At, shape: Shape):
        super().__init__()
        self.spelt = at["spelt"]
        self.weight = self.create_parameter([shape[-1]], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.spelt == "pow":
            return x * paddle.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight
        if self.spelt == "square":
            return self.weight * (x * paddle.rsqrt(paddle.square(x).mean(axis=-1, keepdim=True) + 1e-5))
        if self.spelt == "product":
            return self.weight * (x * (paddle.mean(x * x, axis=-1, keepdim=True) + 1e-5) ** -0.5)
        if self.spelt == "divide":
            return x / paddle.sqrt(paddle.mean(x * x, axis=-1, keepdim=True) + 1e-5) * self.weight
        return x * self.weight / paddle.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-5)


def norm(name: str, width: int) -> nn.Layer:
    if name == "rms":
        return RMSNorm({"spelt": "pow"}, (width,))
    return nn.Identity() if name == "none" else nn.LayerNorm(width)


class LowRank(nn.Layer):
    """x W + (x A) B."""

    def __init__(self, at: At, shape: Shape):
        super().__init__()
        width = shape[-1]
        self.map = nn.Linear(width, width)
        self.down, self.up = (nn.Linear(*size, bias_attr=False) for size in ((width, at["rank"]), (at["rank"], width)))

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x) + self.up(self.down(x))


class Scale(nn.Layer):
    def __init__(self, at: At, shape: Shape):
        super().__init__()
        self.gamma = self.create_parameter([shape[-1]], default_initializer=nn.initializer.Constant(1.0))
        self.beta = self.create_parameter([shape[-1]], is_bias=True) if at["bias"] else None

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gamma
        return x if self.beta is None else x + self.beta


class Elementwise(nn.Layer):
    def __init__(self, at: At, *_: Shape):
        super().__init__()
        self.op = at["how"]

    def forward(self, x: Tensor) -> Tensor:
        if self.op == "softmax":
            return F.softmax(x, axis=-1)
        if self.op == "half":
            return x * 0.5
        if self.op == "square":
            return paddle.square(x)
        if self.op == "abs":
            return paddle.abs(x)
        if self.op == "clip":
            return paddle.clip(x, -1.5, 1.5)
        if self.op == "minus":
            return 1.0 - x
        if self.op == "normalize":
            return F.normalize(x, axis=-1)
        return activate(x, self.op)


class Dropout(nn.Layer):
    def __init__(self, at: At, *_: Shape):
        super().__init__()
        self.drop = nn.Dropout(at["p"])

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x)


class Conv(nn.Layer):
    def __init__(self, at: At, shape: Shape):
        super().__init__()
        self.at, kernel = at, at["kernel"]
        self.conv = nn.Conv2D(
            shape[0], at["channels"], kernel, stride=at["stride"], padding=kernel // 2, bias_attr=None if at["bias"] else False
        )
        self.norm = nn.BatchNorm2D(at["channels"]) if at["norm"] == "batch" else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = activate(x if self.norm is None else self.norm(x), self.at["activation"])
        if self.at["pool"] == "none":
            return x
        return F.max_pool2d(x, 2) if self.at["pool"] == "max" else F.avg_pool2d(x, 2)


class ImagePool(nn.Layer):
    def __init__(self, at: At, *_: Shape):
        super().__init__()
        self.spelt = at["spelt"]

    def forward(self, x: Tensor) -> Tensor:
        return x.mean([2, 3]) if self.spelt == "mean" else F.adaptive_avg_pool2d(x, 1).flatten(1)


LAYERS: dict[str, type[nn.Layer]] = {
    "conv": Conv,
    "dropout": Dropout,
    "elementwise": Elementwise,
    "embedding": Embedding,
    "head": Linear,
    "image_pool": ImagePool,
    "layer_norm": LayerNorm,
    "linear": Linear,
    "low_rank": LowRank,
    "patch_embedding": PatchEmbedding,
    "rms_norm": RMSNorm,
    "scale": Scale,
    "tied_head": TiedHead,
}
