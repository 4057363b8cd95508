"""Models and a pattern for the tests of the test kit; at the top of a module, since other processes build them too."""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn
from paddle.static import InputSpec

from paddle_rbt_plugin import Pattern


class TwoLayers(Pattern):
    """down(sin(up(x))), which no built-in pattern knows."""

    name = "kit_two_layers"

    def build(self, g):
        h = g.linear(g.tensor("x"), g.param("up", ndim=2), g.param("up_bias", ndim=1))
        g.linear(g.op("sin", h), g.param("down", ndim=2), g.param("down_bias", ndim=1))

    shard = {
        "x": ("dp", ..., None),
        "up": (None, "mp"),
        "up_bias": ("mp",),
        "down": ("mp", None),
        "down_bias": (None,),
    }


class Siren(nn.Layer):
    """Two blocks of it, and an embedding before."""

    def __init__(self, wide: int = 64, activation=paddle.sin):
        super().__init__()
        self.words = nn.Embedding(16, 32)
        self.up, self.down = (nn.LayerList([nn.Linear(*s) for _ in range(2)]) for s in ((32, wide), (wide, 32)))
        self.activation = activation

    def forward(self, tokens):
        x = self.words(tokens)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(self.activation(up(x)))
        return paddle.mean(x * x)


SPEC = [InputSpec([4, 8], "int64", "tokens")]


def siren():
    return Siren(), SPEC


def with_loss():
    class Hidden(nn.Layer):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x):
            return self.down(paddle.sin(self.up(x)))

    return Hidden(), [InputSpec([4, 32], "float32", "x")], nn.MSELoss(), [InputSpec([4, 32], "float32", "y")]


def ones(step):
    return [np.full([4, 32], step + 1.0, "float32"), np.zeros([4, 32], "float32")]


def rank_dependent():
    """What a test of equal losses must find: a model that is not the same in every process."""
    model = Siren()
    shift = paddle.distributed.get_world_size() - 1
    model.words.weight.set_value(model.words.weight + 0.1 * shift)
    return model, SPEC
