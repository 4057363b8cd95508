"""Clustering of a model's ops into its repeated layers, and the reverse: a deep model's graph from a shallow one's."""

from paddle_rbt_plugin.layers.cluster import cluster_layers
from paddle_rbt_plugin.layers.layers import Layers, Segment
from paddle_rbt_plugin.layers.repeat import repeat_layers
from paddle_rbt_plugin.layers.structure import external_inputs

__all__ = ["Layers", "Segment", "cluster_layers", "external_inputs", "repeat_layers"]
