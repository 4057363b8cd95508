"""Mixtral: LLaMA whose feed-forward networks are experts, their weights stacked, [experts, in, out]. Every expert sees
every token and the router's weights of the two chosen ones decide, so that shapes do not depend on values."""

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

    def forward(self, x):
        tokens = paddle.reshape(x, [-1, HIDDEN])
        scores = F.softmax(self.router(tokens))
        best, _ = paddle.topk(scores, CHOSEN, axis=-1)
        kept = paddle.where(scores >= best[:, -1:], scores, paddle.zeros_like(scores))
        kept = kept / paddle.sum(kept, axis=-1, keepdim=True)
        h = tokens.unsqueeze(0)
        h = paddle.matmul(F.silu(paddle.matmul(h, self.gate)) * paddle.matmul(h, self.up), self.down)
        mixed = paddle.sum(h * paddle.transpose(kept, [1, 0]).unsqueeze(-1), axis=0)
        return paddle.reshape(mixed, x.shape)


def mixtral():
    return Llama(kv_heads=4, share=share_by_expand, ffn=Experts)
