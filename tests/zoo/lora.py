"""LLaMA whose projections are frozen and have low-rank adapters beside them (LoRA, arXiv 2106.09685)."""

from paddle import nn
from paddle.nn import functional as F

from .llama import llama3
from .parts import linear

RANK = 4


class Adapted(nn.Layer):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.base.weight.stop_gradient = True
        inputs, outputs = base.weight.shape
        self.down, self.up = linear(inputs, RANK, bias=False), linear(RANK, outputs, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(F.dropout(x, 0.0))) * 2.0


def lora():
    model = llama3()
    for block in model.blocks:
        for part in (block.attention, block.ffn):
            for name, layer in list(part.named_children()):
                setattr(part, name, Adapted(layer))
    return model
