"""Mixtral: LLaMA whose feed-forward networks are experts, their weights stacked, [experts, in, out]. Shapes do not depend on
values: either every expert sees every token and the router's weights of the two chosen ones decide, or each sequence sends an
expert as many tokens as it has room for, by products with one-hot matrices (GShard, arXiv 2006.16668)."""

import paddle
from paddle import nn
from paddle.nn import functional as F

from .llama import Llama, share_by_expand
from .parts import FFN, HIDDEN, linear

EXPERTS, CHOSEN = 4, 2


class Experts(nn.Layer):
    def __init__(self):
        super().__init__()
        self.router = linear(HIDDEN, EXPERTS, bias=False)
        self.gate, self.up = (self.create_parameter([EXPERTS, HIDDEN, FFN]) for _ in range(2))
        self.down = self.create_parameter([EXPERTS, FFN, HIDDEN])

    def weights(self, tokens):
        """[..., hidden] to [..., experts]: how much each expert counts for each token, 0 unless it is chosen."""
        scores = F.softmax(self.router(tokens))
        best, _ = paddle.topk(scores, CHOSEN, axis=-1)
        kept = paddle.where(scores >= best[..., -1:], scores, paddle.zeros_like(scores))
        return kept / paddle.sum(kept, axis=-1, keepdim=True)

    def experts(self, h):
        """[experts, tokens, hidden], each expert its own tokens."""
        return paddle.matmul(F.silu(paddle.matmul(h, self.gate)) * paddle.matmul(h, self.up), self.down)

    def forward(self, x):
        tokens = paddle.reshape(x, [-1, HIDDEN])
        kept = self.weights(tokens)
        h = self.experts(paddle.tile(tokens.unsqueeze(0), [EXPERTS, 1, 1]))
        mixed = paddle.sum(h * paddle.transpose(kept, [1, 0]).unsqueeze(-1), axis=0)
        return paddle.reshape(mixed, x.shape)


class DispatchedExperts(Experts):
    def forward(self, x):
        batch, seq, _ = x.shape
        room = seq * CHOSEN // EXPERTS
        kept = self.weights(x)
        chosen = paddle.cast(kept > 0, x.dtype)
        place = paddle.cumsum(chosen, axis=1) * chosen - 1  # of a token among those of its expert; -1 for the others
        fits = (place >= 0) & (place < room)
        place = paddle.cast(paddle.where(fits, place, paddle.full_like(place, room)), "int64")
        slot = paddle.reshape(F.one_hot(place, room + 1)[..., :room], [batch, seq, EXPERTS * room])
        sent = paddle.matmul(slot, x, transpose_x=True)
        sent = paddle.transpose(paddle.reshape(sent, [batch, EXPERTS, room, HIDDEN]), [1, 0, 2, 3])
        back = self.experts(paddle.reshape(sent, [EXPERTS, batch * room, HIDDEN]))
        back = paddle.transpose(paddle.reshape(back, [EXPERTS, batch, room, HIDDEN]), [1, 0, 2, 3])
        mixed = paddle.reshape(slot, [batch, seq, EXPERTS, room]) * kept.unsqueeze(-1)
        mixed = paddle.reshape(mixed, [batch, seq, EXPERTS * room])
        return paddle.matmul(mixed, paddle.reshape(back, [batch, EXPERTS * room, HIDDEN]))


def mixtral():
    return Llama(kv_heads=4, share=share_by_expand, ffn=Experts)


def gshard():
    return Llama(kv_heads=4, share=share_by_expand, ffn=DispatchedExperts)
