"""Blocks as Layers: attention and feed-forward networks, in the spellings that models are written in."""

from __future__ import annotations

import math

import paddle
from paddle import nn
from paddle.nn import functional as F

from random_models.layers import At, Shape, Tensor, activate, norm


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
        return tuple(parts[i].reshape([0, 0, heads[i], self.size]).transpose([0, 2, 1, 3]) for i in range(3))

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


class TransformerLayer(nn.Layer):
    """Attention and feed-forward network, each with its norm and its residual."""

    def __init__(self, at: At, shape: Shape):
        super().__init__()
        both = {**at, "residual": True, "expand": "repeat_interleave"}
        self.attention = Attention(both, shape)
        self.mlp = FeedForward({**both, "factor": 4}, shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))


LAYERS: dict[str, type[nn.Layer]] = {
    "attention": Attention,
    "cross_attention": Attention,
    "feed_forward": FeedForward,
    "masked_attention": MaskedAttention,
    "parallel_block": ParallelBlock,
    "transformer_layer": TransformerLayer,
}
