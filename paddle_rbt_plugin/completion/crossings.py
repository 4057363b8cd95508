"""What layers read of each other, and so what a cut of a model into pipeline stages makes them send."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

from paddle_rbt_plugin.completion.work import Crossing, Value
from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.graph.constants import constant_ops
from paddle_rbt_plugin.layers.layers import Layers, Segment

Apart = tuple[tuple[int, int, int], ...]
"""A segment, a parameter that it reads on another stage than the parameter's, the first segment of its stage to do so."""


def reads_apart(graph: Graph, layers: Layers, stages: Sequence[int]) -> Apart:
    """The parameters that segments read on another stage than their own; ``stages`` holds the stage of each layer.

    Such a stage has a copy of its own. Different cuts of a model mostly have the same answer: none, or a head that is tied to
    the embedding."""
    home: dict[int, int] = {}
    first: dict[tuple[int, int], int] = {}
    apart = []
    for i, segment in enumerate(layers.segments):
        stage = stages[segment.layer]
        for t in externals_of(graph, segment):
            if graph.tensors[t].kind == "param" and home.setdefault(t, stage) != stage:
                apart.append((i, t, first.setdefault((t, stage), i)))
    return tuple(apart)


def crossings(
    graph: Graph,
    layers: Layers,
    externals: Sequence[Sequence[int]],
    value_of: Callable[[int], Value],
    returning: Mapping[int, Collection[int]],
) -> Iterator[Crossing]:
    """What layers read of others: the values that their segments make, and parameters and data where several read them.

    ``externals`` holds what each segment reads, see ``externals_of``, ``returning`` the layers that give a tensor a gradient."""
    constant = constant_ops(graph)
    readers: dict[int, dict[int, None]] = {}
    for segment, read in zip(layers.segments, externals, strict=True):
        for t in read:
            readers.setdefault(t, {})[segment.layer] = None
    home = {t: segment.layer for segment in layers.segments for t in results_of(graph, segment)}
    for t, reading in readers.items():
        layer = home.get(t, next(iter(reading)))
        others = tuple(sorted(reading.keys() - {layer}))
        if others:
            back = tuple(other for other in others if other in returning.get(t, ()))
            yield Crossing(value_of(t), layer, others, back, _how(graph, t, constant))


def _how(graph: Graph, tensor: int, constant: Collection[int]) -> Literal["sent", "fed", "computed", "copied"]:
    producer, kind = graph.producer(tensor), graph.tensors[tensor].kind
    if producer is None:
        return "copied" if kind == "param" else "fed"
    return "computed" if producer.index in constant else "sent"


def results_of(graph: Graph, segment: Segment) -> list[int]:
    """Tensors that a segment writes."""
    return [t for op in segment.ops for t in graph.ops[op].results]


def externals_of(graph: Graph, segment: Segment) -> tuple[int, ...]:
    """Tensors that a segment reads and does not write, in the order of first use."""
    written = set(results_of(graph, segment))
    read = (t for op in segment.ops for t in graph.ops[op].operands)
    return tuple(dict.fromkeys(t for t in read if t not in written))
