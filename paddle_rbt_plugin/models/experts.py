"""Mixtures of experts with stacked weights, [experts, in, out].

Each expert takes as many tokens of a group as it would get if the load were balanced; what is beyond passes it by, as in
GShard (arXiv 2006.16668, section 2.2). Groups are short pieces of a sequence, so that the products with one-hot matrices which
send tokens to experts and fetch them back are a few per cent of the experts' own work.
"""

from __future__ import annotations

import math

import paddle
from paddle import nn
from paddle.nn import functional as F

from paddle_rbt_plugin.models.feed_forward import GatedFeedForward, gate
from paddle_rbt_plugin.models.projection import linear, normal
from paddle_rbt_plugin.models.transformer import Experts, FeedForward, Transformer

_GROUP = 128
"""Tokens of a group, about: the products with one-hot matrices cost 4 x group x chosen x hidden per token, the experts 6 x
chosen x width x hidden."""


class Mixture(nn.Layer):
    """The experts of one layer, their router, and a shared expert."""

    def __init__(self, config: Transformer, experts: Experts):
        super().__init__()
        self.experts, self.group = experts, group_of(config.seq, experts)
        self.room = max(1, math.ceil(self.group * experts.chosen / experts.count))
        hidden, width = config.hidden, experts.width
        self.router = linear(config, hidden, experts.count, experts.router_bias)
        self.gate_weight = self._stacked(config, [hidden, width])
        self.up_weight = self._stacked(config, [hidden, width])
        self.down_weight = self._stacked(config, [width, hidden])
        if experts.bias:
            self.gate_bias, self.up_bias = (self._zeros([experts.count, 1, width]) for _ in range(2))
            self.down_bias = self._zeros([experts.count, 1, hidden])
        if experts.balanced:
            self.balance = self._zeros([experts.count])
            self.balance.stop_gradient = True
        if experts.shared_width:
            self.shared = GatedFeedForward(config, FeedForward(width=experts.shared_width, activation=experts.activation))
        if experts.shared_gate:
            self.shared_gate = linear(config, hidden, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """``x`` is [batch, seq, hidden]."""
        batch, seq, hidden = x.shape
        count, room, groups = self.experts.count, self.room, batch * (seq // self.group)
        tokens = paddle.reshape(x, [groups, self.group, hidden])
        weights, chosen = self.weights(tokens)
        slots = self.slots(chosen)
        sent = paddle.matmul(paddle.reshape(slots, [groups, self.group, count * room]), tokens, transpose_x=True)
        sent = paddle.transpose(paddle.reshape(sent, [groups, count, room, hidden]), [1, 0, 2, 3])
        back = self.expert(paddle.reshape(sent, [count, groups * room, hidden]))
        back = paddle.transpose(paddle.reshape(back, [count, groups, room, hidden]), [1, 0, 2, 3])
        back = paddle.reshape(back, [groups, count * room, hidden])
        mixing = paddle.reshape(slots * paddle.unsqueeze(weights, -1), [groups, self.group, count * room])
        mixed = paddle.reshape(paddle.matmul(mixing, back), [batch, seq, hidden])
        if self.experts.shared_width:
            shared = self.shared(x)
            mixed = mixed + (F.sigmoid(self.shared_gate(x)) * shared if self.experts.shared_gate else shared)
        return mixed

    def weights(self, tokens: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """[..., hidden] to two of [..., experts]: how much each expert counts for each token, 0 unless it is chosen, and
        1 where it is."""
        scores = self.router(tokens)
        scores = F.softmax(scores) if self.experts.scores == "softmax" else F.sigmoid(scores)
        ranked = scores + self.balance if self.experts.balanced else scores
        best, _ = paddle.topk(ranked, self.experts.chosen, axis=-1)
        chosen = paddle.cast(ranked >= best[..., -1:], scores.dtype)
        kept = scores * chosen
        if self.experts.renormalise:
            kept = kept / (paddle.sum(kept, axis=-1, keepdim=True) + 1e-20)
        return paddle.scale(kept, self.experts.scaling) if self.experts.scaling != 1.0 else kept, chosen

    def slots(self, chosen: paddle.Tensor) -> paddle.Tensor:
        """[groups, tokens, experts] to [groups, tokens, experts, room]: 1 at the place of a token among those of its expert."""
        place = paddle.cumsum(chosen, axis=1) * chosen - 1.0  # -1 for the tokens of other experts
        fits = (place >= 0) & (place < self.room)
        place = paddle.cast(paddle.where(fits, place, paddle.full_like(place, self.room)), "int64")
        return F.one_hot(place, self.room + 1)[..., : self.room]

    def expert(self, x: paddle.Tensor) -> paddle.Tensor:
        """[experts, tokens, hidden], each expert its own tokens."""
        gated, up = paddle.matmul(x, self.gate_weight), paddle.matmul(x, self.up_weight)
        if self.experts.bias:
            gated, up = gated + self.gate_bias, up + self.up_bias
        down = paddle.matmul(gate(self.experts.activation, gated, up), self.down_weight)
        return down + self.down_bias if self.experts.bias else down

    def _stacked(self, config: Transformer, shape: list[int]) -> paddle.Tensor:
        return self.create_parameter([self.experts.count, *shape], attr=normal(config))

    def _zeros(self, shape: list[int]) -> paddle.Tensor:
        return self.create_parameter(shape, is_bias=True)


def group_of(seq: int, experts: Experts) -> int:
    """Tokens of a group: the divisor of the sequence of at least ``_GROUP`` tokens, or else the largest one, for which the
    fewest places of experts stay empty, and the smallest among equals."""
    divisors = [d for d in range(1, seq + 1) if seq % d == 0]
    large = [d for d in divisors if _GROUP <= d <= 4 * _GROUP] or [divisors[-1]]

    def empty(group: int) -> float:
        balanced = group * experts.chosen / experts.count
        return math.ceil(balanced) / balanced

    return min(large, key=lambda d: (round(empty(d), 2), d))
