"""Analyses of small models for the tests of the search."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from paddle_rbt_plugin.cluster import Cluster, parse_cluster
from paddle_rbt_plugin.cost.candidate import Training
from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.handover.pir.configs import config_graph
from paddle_rbt_plugin.models import GPTConfig
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import Analysis, SearchSpace, analyse
from paddle_rbt_plugin.search.state import Search

TINY = {"hidden": 64, "ffn": 256, "heads": 8, "vocab": 512, "seq": 32}
"""A model whose cost is launches and latency."""
WIDE = {"hidden": 4096, "ffn": 16384, "heads": 32, "vocab": 50304, "seq": 1024}
"""A model whose cost is products, and whose memory is short."""


@lru_cache(maxsize=16)
def gpt_analysis(layers: int = 4, batch: int = 24, wide: bool = False, frozen_embedding: bool = False) -> Analysis:
    """A GPT of the given depth. No state is changed by a search, so tests share it."""
    config = GPTConfig(layers=layers, **(WIDE if wide else TINY))
    graph = config_graph(config, batch)
    if frozen_embedding:
        tied = (config.vocab, config.hidden)
        tensors = tuple(replace(t, stop_gradient=t.stop_gradient or t.shape == tied) for t in graph.tensors)
        graph = Graph(tensors, graph.ops, graph.loss)
    return analyse(graph, load_plugins(()).patterns)


def search_of(
    cluster: str | Cluster,
    *,
    layers: int = 4,
    batch: int = 24,
    wide: bool = False,
    precision: str = "fp16",
    frozen_embedding: bool = False,
    own_copies: bool = False,
    overlap_gradients: bool = False,
    mode: str = "train",
    **space: object,
) -> Search:
    """A search over a small GPT, whose head is tied to its embedding."""
    choices = {"mode": mode, "own_copies": own_copies, "overlap_gradients": overlap_gradients}
    training = Training(batch, precision, **choices)  # type: ignore[arg-type]
    parsed = cluster if isinstance(cluster, Cluster) else parse_cluster(cluster)
    return Search(gpt_analysis(layers, batch, wide, frozen_embedding), parsed, training, SearchSpace.parse(space))
