"""Linear projections and embeddings, with the initial weights that the config asks for."""

from __future__ import annotations

import paddle
from paddle import nn

from paddle_rbt_plugin.models.transformer import Transformer


def linear(config: Transformer, width_in: int, width_out: int, bias: bool = False) -> nn.Linear:
    """x W, plus a bias that begins at zero."""
    return nn.Linear(width_in, width_out, weight_attr=normal(config), bias_attr=None if bias else False)


def embedding(config: Transformer, count: int, width: int) -> nn.Embedding:
    """A table of ``count`` vectors."""
    return nn.Embedding(count, width, weight_attr=normal(config))


def normal(config: Transformer) -> paddle.ParamAttr:
    """Weights that begin as a normal distribution."""
    return paddle.ParamAttr(initializer=nn.initializer.Normal(0.0, config.init_std))
