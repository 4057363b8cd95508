"""How many parameters a model has, counted on the Layer that is built of its config."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import paddle

from paddle_rbt_plugin.models.build import build
from paddle_rbt_plugin.models.config import Config
from paddle_rbt_plugin.models.experts import Mixture


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters; what is tied counts once."""

    total: int
    active: int
    """Those that take part in the work of one token: all but the experts that are not chosen."""


def count_parameters(config: Config) -> Parameters:
    """The parameters of a model, without allocating any."""
    with paddle.LazyGuard():
        layer = build(config)
    total = sum(prod(p.shape) for p in layer.parameters())
    idle = 0
    for part in layer.sublayers():
        if isinstance(part, Mixture):
            stacked = sum(prod(p.shape) for p in part.parameters(include_sublayers=False) if len(p.shape) == 3)
            idle += stacked - stacked * part.experts.chosen // part.experts.count
    return Parameters(total, total - idle)
