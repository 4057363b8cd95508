"""LLaMA with the latent attention of DeepSeek-V2 (arXiv 2405.04434): queries, keys and values come from narrow vectors, and all
heads share one rotary key."""

import paddle
from paddle import nn
from paddle.nn import functional as F

from .llama import Block, Llama
from .parts import HEADS, HIDDEN, GatedFeedForward, RMSNorm, core, linear, merge_heads, rotate_half

PLAIN, ROTARY, VALUE, QUERY_RANK, RANK = 8, 8, 8, 4, 4


class LatentAttention(nn.Layer):
    def __init__(self):
        super().__init__()
        self.q_a, self.q_b = linear(HIDDEN, QUERY_RANK, bias=False), linear(QUERY_RANK, HEADS * (PLAIN + ROTARY), bias=False)
        self.kv_a, self.kv_b = linear(HIDDEN, RANK + ROTARY, bias=False), linear(RANK, HEADS * (PLAIN + VALUE), bias=False)
        self.q_norm, self.kv_norm = RMSNorm(QUERY_RANK), RMSNorm(RANK)
        self.out = linear(HEADS * VALUE, HIDDEN, bias=False)

    def forward(self, x, cos, sin, mask):
        plain, rotary = paddle.split(self.q_b(self.q_norm(self.q_a(x))).reshape([0, 0, HEADS, -1]), [PLAIN, ROTARY], axis=-1)
        narrow, shared = paddle.split(self.kv_a(x), [RANK, ROTARY], axis=-1)
        key, value = paddle.split(self.kv_b(self.kv_norm(narrow)).reshape([0, 0, HEADS, -1]), [PLAIN, VALUE], axis=-1)
        shared = rotate_half(shared.unsqueeze(2), cos, sin).expand([-1, -1, HEADS, -1])
        query = paddle.concat([plain, rotate_half(rotary, cos, sin)], axis=-1)
        return self.out(merge_heads(core(query, paddle.concat([key, shared], axis=-1), value, mask)))


def deepseek():
    model = Llama(layers=0)
    model.blocks = nn.LayerList([Block(LatentAttention(), GatedFeedForward(F.silu)) for _ in range(2)])
    return model
