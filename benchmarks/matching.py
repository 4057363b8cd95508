"""Prints how long all patterns together take on LLaMA graphs of growing depth, and how far each stays from its budget.

    python benchmarks/matching.py [--layers 16 32 64 126]

The graph of a deep model is repeated from a trace of three blocks, so nothing here depends on tracing time.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence

import paddle

from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.handover.pir.trace import trace_layer
from paddle_rbt_plugin.layers import cluster_layers, repeat_layers
from paddle_rbt_plugin.models import LlamaConfig, build, input_spec
from paddle_rbt_plugin.pattern import CompiledPattern, match_all
from paddle_rbt_plugin.pattern.match import MAX_STEPS
from paddle_rbt_plugin.pattern.matcher import Budget, GraphIndex, occurrences
from paddle_rbt_plugin.plugins import load_plugins


def llama(layers: int) -> Graph:
    """LLaMA with grouped queries."""
    config = LlamaConfig(layers=3, hidden=64, ffn=128, heads=8, kv_heads=4, vocab=128, seq=32)
    with paddle.LazyGuard():
        model = build(config)
    graph = trace_layer(model, input_spec(config, 8)).graph
    return repeat_layers(graph, cluster_layers(graph), layers)


def steps(index: GraphIndex, pattern: CompiledPattern) -> int:
    """Candidates that the search for one pattern tries."""
    budget = Budget(MAX_STEPS)
    for variant in pattern.variants:
        for _ in occurrences(variant, index, budget):
            pass
    return MAX_STEPS - budget.steps


def main(depths: Sequence[int]) -> None:
    """One line per depth, then the dearest patterns of the deepest graph."""
    patterns = load_plugins().patterns
    for depth in depths:
        graph = llama(depth)
        layers = cluster_layers(graph)
        start, busy = time.perf_counter(), time.process_time()
        result = match_all(graph, patterns, layers)
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        found = f"{depth:4} layers  {len(graph.ops):6} ops  {len(result.matches):5} matches"
        print(f"{found}  {seconds:6.3f} s, {busy:6.3f} s of them on the CPU")
    index = GraphIndex(graph)
    spent = sorted(((steps(index, p), p.name) for p in patterns), reverse=True)
    print(f"candidates tried at {depth} layers, of {MAX_STEPS:,} allowed to each pattern:")
    for count, name in spent[:5]:
        print(f"  {name:24} {count:9,}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[16, 32, 64, 126])
    main(parser.parse_args().layers)
