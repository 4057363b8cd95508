"""LLaMA-2, LLaMA-3 and Qwen: the same decoder with many or few key and value heads, with or without biases of the
projections, attention written out or by ``scaled_dot_product_attention``, and a head of its own or a tied one."""

from functools import partial

import paddle
from paddle import nn
from paddle.nn import functional as F

from .parts import (
    HEAD,
    HEADS,
    HIDDEN,
    VOCAB,
    GatedFeedForward,
    RMSNorm,
    causal_mask,
    core,
    linear,
    merge_heads,
    rotary_tables,
    rotate_half,
    split_heads,
    token_loss,
)

PIR = "FLAGS_enable_pir_api"

CAUSAL_NEEDS_GPU = paddle.__version__.startswith(("3.0", "3.1", "3.2")) and paddle.get_flags(PIR)[PIR]
"""Before 3.3 ``is_causal`` is a fused softmax in PIR and dygraph, which has no CPU kernel."""


def share_by_expand(x, times):
    """[batch, seq, kv heads, d] to [batch, seq, heads, d], as transformers does it."""
    shape = [x.shape[0], x.shape[1], x.shape[2], times, x.shape[3]]
    return paddle.reshape(paddle.expand(x.unsqueeze(3), shape), [0, 0, x.shape[2] * times, x.shape[3]])


def share_by_repeat(x, times):
    return paddle.repeat_interleave(x, times, axis=2)


class Attention(nn.Layer):
    def __init__(self, kv_heads, bias, share, fused_core):
        super().__init__()
        self.kv_heads, self.share, self.fused_core = kv_heads, share, fused_core
        self.q = linear(HIDDEN, HIDDEN, bias)
        self.k, self.v = linear(HIDDEN, kv_heads * HEAD, bias), linear(HIDDEN, kv_heads * HEAD, bias)
        self.out = linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x, cos, sin, mask):
        query = rotate_half(split_heads(self.q(x), HEADS), cos, sin)
        key = rotate_half(split_heads(self.k(x), self.kv_heads), cos, sin)
        value = split_heads(self.v(x), self.kv_heads)
        if self.kv_heads < HEADS:
            key, value = (self.share(h, HEADS // self.kv_heads) for h in (key, value))
        if self.fused_core:
            causal = {"attn_mask": mask} if CAUSAL_NEEDS_GPU else {"is_causal": True}
            context = F.scaled_dot_product_attention(query, key, value, **causal)
        else:
            context = core(query, key, value, mask)
        return self.out(merge_heads(context))


class Block(nn.Layer):
    def __init__(self, attention, ffn):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(), RMSNorm()
        self.attention, self.ffn = attention, ffn

    def forward(self, x, cos, sin, mask):
        x = x + self.attention(self.norm1(x), cos, sin, mask)
        return x + self.ffn(self.norm2(x))


class Llama(nn.Layer):
    def __init__(self, layers=2, kv_heads=HEADS, bias=False, share=None, fused_core=False, tied=False, ffn=None):
        super().__init__()
        ffn = ffn or (lambda: GatedFeedForward(F.silu))
        self.words = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.LayerList([Block(Attention(kv_heads, bias, share, fused_core), ffn()) for _ in range(layers)])
        self.norm = RMSNorm()
        self.head = None if tied else linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens, labels):
        seq = tokens.shape[1]
        (cos, sin), mask = rotary_tables(seq, HEAD), causal_mask(seq)
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        x = self.norm(x)
        logits = paddle.matmul(x, self.words.weight, transpose_y=True) if self.head is None else self.head(x)
        return token_loss(logits, labels)


def llama2():
    return Llama(fused_core=True)


def llama3():
    return Llama(kv_heads=4, share=share_by_expand)


def qwen():
    ffn = partial(GatedFeedForward, F.silu, fused=True)
    return Llama(kv_heads=4, bias=True, share=share_by_repeat, fused_core=True, tied=True, ffn=ffn)


def multi_query():
    return Llama(kv_heads=1, share=share_by_expand)
