"""Mixtures of experts as they are written for dygraph: each expert is a Layer of its own, on the tokens that chose it."""

import paddle
from paddle import nn
from paddle.nn import functional as F

from .parts import HIDDEN, GatedFeedForward, linear

EXPERTS, CHOSEN = 4, 2


class ListedExperts(nn.Layer):
    """A router, and a list of experts. ``mix`` computes [tokens, hidden] from that, the numbers of the chosen experts and
    their weights, both [tokens, chosen]."""

    def __init__(self):
        super().__init__()
        self.router = linear(HIDDEN, EXPERTS, bias=False)
        self.each = nn.LayerList([GatedFeedForward(F.silu) for _ in range(EXPERTS)])

    def forward(self, x):
        tokens = x.view([-1, HIDDEN])
        weights, chosen = paddle.topk(F.softmax(self.router(tokens)), CHOSEN, axis=-1)
        return self.mix(tokens, chosen, weights / weights.sum(-1, keepdim=True)).view(x.shape)

    def mix(self, tokens, chosen, weights):
        raise NotImplementedError


class WhereIndexAdd(ListedExperts):
    def mix(self, tokens, chosen, weights):
        mixed = paddle.zeros_like(tokens)
        mask = F.one_hot(chosen, EXPERTS).transpose([2, 1, 0])
        for i, expert in enumerate(self.each):
            place, token = paddle.where(mask[i])
            if token.shape[0] == 0:
                continue
            mixed.index_add_(token, 0, expert(tokens[token]) * weights[token, place].unsqueeze(-1))
        return mixed


class NonzeroScatter(ListedExperts):
    def mix(self, tokens, chosen, weights):
        mixed = paddle.zeros_like(tokens)
        for i, expert in enumerate(self.each):
            hit = chosen == i
            token = paddle.nonzero(hit.any(-1)).flatten()
            weight = (weights * hit.astype(weights.dtype)).sum(-1)
            sent = paddle.index_select(tokens, token, axis=0)
            mixed = paddle.scatter(mixed, token, expert(sent) * paddle.gather(weight, token).unsqueeze(-1), overwrite=False)
        return mixed


class MaskedAssignment(ListedExperts):
    def mix(self, tokens, chosen, weights):
        mixed = paddle.zeros_like(tokens)
        for i, expert in enumerate(self.each):
            hit = (chosen == i).any(axis=-1)
            if not hit.any():
                continue
            weight = (weights * (chosen == i).astype(weights.dtype)).sum(-1, keepdim=True)
            mixed[hit] += expert(tokens[hit]) * weight[hit]
        return mixed


class SortedSplit(ListedExperts):
    def mix(self, tokens, chosen, weights):
        flat = chosen.flatten()
        order = paddle.argsort(flat)
        counts = paddle.bincount(flat, minlength=EXPERTS).tolist()
        sent = paddle.split(tokens[order // CHOSEN], counts)
        back = paddle.concat([expert(part) for expert, part in zip(self.each, sent, strict=True)])
        back = back * weights.flatten()[order].unsqueeze(-1)
        return paddle.zeros_like(tokens).index_add(order // CHOSEN, 0, back)


class OnlyHitExperts(ListedExperts):
    def mix(self, tokens, chosen, weights):
        mixed = paddle.zeros_like(tokens)
        mask = F.one_hot(chosen, EXPERTS).transpose([2, 1, 0])
        for i in paddle.nonzero(mask.sum(axis=[1, 2]) > 0).flatten().tolist():
            place, token = paddle.where(mask[i] > 0)
            mixed = paddle.index_add(mixed, token, 0, self.each[i](tokens[token]) * weights[token, place, None])
        return mixed


class Switch(nn.Layer):
    """One expert for each token."""

    def __init__(self):
        super().__init__()
        self.router = linear(HIDDEN, EXPERTS, bias=False)
        self.each = nn.LayerList([GatedFeedForward(F.silu) for _ in range(EXPERTS)])

    def forward(self, x):
        tokens = x.reshape([-1, HIDDEN])
        scores = F.softmax(self.router(tokens))
        chosen = paddle.argmax(scores, axis=-1)
        mixed = paddle.zeros_like(tokens)
        for i, expert in enumerate(self.each):
            token = paddle.nonzero(chosen == i).squeeze(-1)
            if token.numel() == 0:
                continue
            mixed = paddle.index_add(mixed, token, 0, expert(tokens[token]) * scores[:, i][token].unsqueeze(-1))
        return mixed.reshape(x.shape)


STYLES = (WhereIndexAdd, NonzeroScatter, MaskedAssignment, SortedSplit, OnlyHitExperts, Switch)
