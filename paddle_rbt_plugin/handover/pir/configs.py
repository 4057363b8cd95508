"""The graph of a named model, whatever its depth, at the price of a few layers."""

from __future__ import annotations

import dataclasses

import paddle
from paddle.utils import unique_name

from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.handover.pir.trace import trace_layer
from paddle_rbt_plugin.layers import cluster_layers, repeat_layers
from paddle_rbt_plugin.models import Config, DecoderConfig, EncoderDecoderConfig, build, input_spec
from paddle_rbt_plugin.models.transformer import period
from paddle_rbt_plugin.tuner import collection_paused

_TRACED_ROUNDS = 3
"""``repeat_layers`` needs a first round of layers, one to repeat, and one to compare that with."""


@collection_paused()
def config_graph(config: Config, batch: int) -> Graph:
    """The forward graph, loss included, of a config on ``batch`` sequences. Nothing is allocated.

    Layers that repeat, one by one or in rounds (five with a window and one without), are traced three times and repeated in the
    graph. Parameters bear the names that Paddle gives them when the model is the first thing that a process builds."""
    first, length = _layout(config)
    rounds, rest = divmod(config.layers - first, length)
    if rounds <= _TRACED_ROUNDS or rest:  # the names of layers behind the last round depend on how many come before
        return _trace(config, config.layers, batch)
    traced = _trace(config, first + _TRACED_ROUNDS * length, batch)
    layers = cluster_layers(traced)
    if len(layers.blocks) != _TRACED_ROUNDS:  # what repeats in the graph is not what repeats in the config
        return _trace(config, config.layers, batch)
    try:
        return repeat_layers(traced, layers, rounds)
    except UnsupportedProgram:
        return _trace(config, config.layers, batch)


def _layout(config: Config) -> tuple[int, int]:
    """How many layers come before those that repeat, and how many make a round of these."""
    if isinstance(config, EncoderDecoderConfig):
        return 0, config.layers  # the decoder repeats as well
    return period(config.kinds()) if isinstance(config, DecoderConfig) else (0, 1)


def _trace(config: Config, layers: int, batch: int) -> Graph:
    with unique_name.guard(), paddle.LazyGuard():
        layer = build(dataclasses.replace(config, layers=layers))
    return trace_layer(layer, input_spec(config, batch)).graph
