"""The graph of a named model, whatever its depth, at the price of three layers."""

from __future__ import annotations

import dataclasses

import paddle
from paddle.utils import unique_name

from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.handover.pir.trace import trace_layer
from paddle_rbt_plugin.layers import cluster_layers, repeat_layers
from paddle_rbt_plugin.models import Config, build, input_spec
from paddle_rbt_plugin.tuner import collection_paused

_TRACED_LAYERS = 3
"""``repeat_layers`` needs a first layer, one to repeat, and one to compare that with."""


@collection_paused()
def config_graph(config: Config, batch: int) -> Graph:
    """The forward graph, loss included, of a config on ``batch`` sequences. Nothing is allocated.

    A model of more than three layers is traced with three and repeated in the graph. Parameters bear the names that Paddle
    gives them when the model is the first thing that a process builds."""
    with unique_name.guard(), paddle.LazyGuard():
        layer = build(dataclasses.replace(config, layers=min(config.layers, _TRACED_LAYERS)))
    traced = trace_layer(layer, input_spec(config, batch)).graph
    return traced if config.layers <= _TRACED_LAYERS else repeat_layers(traced, cluster_layers(traced), config.layers)
