"""The blocks of the grammar as Layers, in the spellings that models are written in."""

from __future__ import annotations

import math
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
        if self.at["spelt"] == "layer":
            x = self.words(ids)
        else:
            x = F.embedding(ids, self.words.weight, padding_idx=self.padding)
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


class Attention(nn.Layer):
    """Multi-head, grouped or multi-query attention; ``source`` makes it cross attention, ``mask`` is added to the scores."""

    def __init__(self, at: At, shape: Shape, *_: Shape):
        super().__init__()
        width = shape[-1]
        self.heads, self.size = at["heads"], width // at["heads"]
        self.kv_heads = min(at.get("kv_heads", self.heads), self.heads)
        self.at, self.width, self.kv_width = at, width, self.kv_heads * self.size
        bias = None if at["bias"] else False
        self.norm = norm(at["norm"], width)
        if at["project"] == "separate":
            self.q = nn.Linear(width, width, bias_attr=bias)
            self.k, self.v = (nn.Linear(width, self.kv_width, bias_attr=bias) for _ in range(2))
        elif at["project"] == "fused_reshape" and self.kv_heads == self.heads:
            self.qkv = nn.Linear(width, 3 * width, bias_attr=bias)
        else:
            self.qkv = nn.Linear(width, width + 2 * self.kv_width, bias_attr=bias)
        self.o = nn.Linear(width, width, bias_attr=bias)

    def projected(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, heads, length, size] each."""
        if self.at["project"] == "separate":
            parts = [self.q(x), self.k(source), self.v(source)]
        elif self.at["project"] == "fused_reshape" and self.kv_heads == self.heads:
            fused = self.qkv(x).reshape([0, 0, self.heads, 3 * self.size]).transpose([0, 2, 1, 3])
            return tuple(paddle.split(fused, 3, axis=-1))
        elif source is not x:  # query of one, key and value of the other, through one weight
            q = F.linear(x, self.qkv.weight, self.qkv.bias)[:, :, : self.width]
            k, v = self.qkv(source)[:, :, self.width :].chunk(2, axis=-1)
            parts = [q, k, v]
        elif self.at["project"] == "fused_slice":
            fused = self.qkv(x)
            ends = (self.width, self.width + self.kv_width)
            parts = [fused[:, :, : ends[0]], fused[:, :, ends[0] : ends[1]], fused[:, :, ends[1] :]]
        else:
            parts = paddle.split(self.qkv(x), [self.width, self.kv_width, self.kv_width], axis=-1)
        heads = (self.heads, self.kv_heads, self.kv_heads)
        return tuple(p.reshape([0, 0, n, self.size]).transpose([0, 2, 1, 3]) for p, n in zip(parts, heads))

    def widened(self, x: Tensor) -> Tensor:
        """Keys or values for every head."""
        times = self.heads // self.kv_heads
        if times == 1:
            return x
        if self.at["expand"] == "repeat_interleave":
            return paddle.repeat_interleave(x, times, axis=1)
        batch, heads, length, size = x.shape
        x = x.unsqueeze(2)
        x = x.expand([batch, heads, times, length, size]) if self.at["expand"] == "expand" else x.tile([1, 1, times, 1, 1])
        return x.reshape([batch, heads * times, length, size])

    def rotated(self, x: Tensor) -> Tensor:
        length, half = x.shape[2], self.size // 2
        angles = paddle.arange(length, dtype="float32").unsqueeze(-1) * paddle.to_tensor(
            [10000 ** (-i / half) for i in range(half)], dtype="float32"
        )
        cos, sin = (t(paddle.concat([angles, angles], axis=-1)) for t in (paddle.cos, paddle.sin))
        turned = paddle.concat([-x[:, :, :, half:], x[:, :, :, :half]], axis=-1)
        return x * cos + turned * sin

    def attended(self, x: Tensor, source: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.projected(x, source)
        if self.at.get("rotary"):
            q, k = self.rotated(q), self.rotated(k)
        k, v = self.widened(k), self.widened(v)
        if self.at["core"] == "sdpa":
            q, k, v = (t.transpose([0, 2, 1, 3]) for t in (q, k, v))
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=bool(self.at.get("causal")) and mask is None
            )
            return self.o(out.reshape([0, 0, self.width]))
        scale = 1 / math.sqrt(self.size)
        if self.at["core"] == "scaled_query":
            scores = paddle.matmul(q * scale, k, transpose_y=True)
        else:
            scores = paddle.matmul(q, k, transpose_y=True) * scale
        if mask is not None:
            scores = scores + mask
        elif self.at.get("causal"):
            scores = scores + paddle.triu(paddle.full([scores.shape[-2], scores.shape[-1]], -1e4), 1)
        out = paddle.matmul(F.softmax(scores, axis=-1), v)
        return self.o(out.transpose([0, 2, 1, 3]).reshape([0, 0, self.width]))

    def forward(self, x: Tensor, source: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        out = self.attended(y, y if source is None else source, mask)
        return x + out if self.at["residual"] else out


class MaskedAttention(Attention):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, None, mask)


class FeedForward(nn.Layer):
    def __init__(self, at: At, shape: Shape):
        super().__init__()
        width, inner = shape[-1], at["factor"] * shape[-1]
        self.at, self.inner, bias = at, inner, None if at["bias"] else False
        self.norm = norm("layer" if at["norm"] == "after" else at["norm"], width)
        self.up = nn.Linear(width, 2 * inner if at["gate"].startswith("fused") else inner, bias_attr=bias)
        if at["gate"] == "separate":
            self.gate = nn.Linear(width, inner, bias_attr=bias)
        self.down = nn.Linear(inner, width, bias_attr=bias)

    def inside(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.at["gate"] == "none":
            return activate(up, self.at["activation"])
        if self.at["gate"] == "separate":
            return activate(self.gate(x), self.at["activation"]) * up
        if self.at["gate"] == "fused_chunk":
            gate, up = paddle.chunk(up, 2, axis=-1)
        else:
            gate, up = up[..., : self.inner], up[..., self.inner :]
        return activate(gate, self.at["activation"]) * up

    def forward(self, x: Tensor) -> Tensor:
        after = self.at["norm"] == "after"
        out = self.down(self.inside(x if after else self.norm(x)))
        out = x + out if self.at["residual"] else out
        return self.norm(out) if after else out


class ParallelBlock(nn.Layer):
    """x + attention(norm(x)) + feed_forward(norm(x)), as in GPT-J."""

    def __init__(self, at: At, shape: Shape):
        super().__init__()
        plain = {"norm": "none", "residual": False, "bias": at["bias"]}
        self.norm = norm(at["norm"], shape[-1])
        self.attention = Attention({**plain, "heads": at["heads"], "project": "separate", "core": "composed"}, shape)
        self.mlp = FeedForward({**plain, "factor": 4, "activation": at["activation"], "gate": "none"}, shape)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y) + self.mlp(y)


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
    "embedding": Embedding,
    "patch_embedding": PatchEmbedding,
    "layer_norm": LayerNorm,
    "rms_norm": RMSNorm,
    "linear": Linear,
    "low_rank": LowRank,
    "scale": Scale,
    "elementwise": Elementwise,
    "dropout": Dropout,
    "attention": Attention,
    "masked_attention": MaskedAttention,
    "cross_attention": Attention,
    "feed_forward": FeedForward,
    "parallel_block": ParallelBlock,
    "token_mixer": TokenMixer,
    "per_head_scale": PerHeadScale,
    "add": Add,
    "concat": Concat,
    "append": Append,
    "stack": Stack,
    "split": Split,
    "swap_halves": SwapHalves,
    "slice": Slice,
    "cut": Cut,
    "broadcast": Broadcast,
    "einsum": Einsum,
    "pool": Pool,
    "flatten": Flatten,
    "conv": Conv,
    "image_pool": ImagePool,
    "head": Linear,
    "tied_head": TiedHead,
}
