"""What layers read of each other, and so what a cut of a model into pipeline stages makes them send."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paddle_rbt_plugin.completion.work import Crossing, Value
from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.layers.layers import Layers, Segment

RemoteReads = tuple[tuple[int, int, int, int], ...]
"""A segment, a tensor that it reads on another stage than the tensor's, the first segment of its stage to do so, and that of
the stage from which the tensor has come there: -1 where that is the tensor's own."""


@dataclass(frozen=True)
class SharedReads:
    """The parameters and sent values that more than one layer reads, whatever the stages."""

    reads: tuple[tuple[int, int, int], ...]
    """Segment, its layer, and a tensor that it reads, in program order."""
    home: Mapping[int, int]
    """Layer of each of these tensors: the layer that makes the value, or reads the parameter first."""


def shared_reads(graph: Graph, layers: Layers) -> SharedReads:
    """What layers read of each other that may have to be copied or handed on, see ``reads_apart``."""
    home = _shared_values(graph, layers)
    readers: dict[int, set[int]] = {}
    reads = []
    for i, segment in enumerate(layers.segments):
        for t in externals_of(graph, segment):
            if graph.tensors[t].kind == "param" or t in home:
                reads.append((i, segment.layer, t))
                readers.setdefault(t, {home.setdefault(t, segment.layer)}).add(segment.layer)
    return SharedReads(tuple(read for read in reads if len(readers[read[2]]) > 1), home)


def reads_apart(shared: SharedReads, stages: Sequence[int]) -> RemoteReads:
    """The parameters that segments read on another stage than their own, of which such a stage has a copy, and the values that
    several layers read on other stages; ``stages`` holds the stage of each layer.

    Different cuts of a model mostly have the same answer: none, or a head that is tied to the embedding."""
    count = max(stages) + 1
    home = shared.home
    readers: dict[int, dict[int, int]] = {}  # of each tensor, by stage the first segment that reads it there
    reading: list[tuple[int, int, int]] = []
    for i, layer, t in shared.reads:
        stage = stages[layer]
        readers.setdefault(t, {}).setdefault(stage, i)
        if stage != stages[home[t]]:
            reading.append((i, stage, t))
    apart = []
    for i, stage, t in reading:
        begin = stages[home[t]]
        first = readers[t][stage]
        before = [
            (f, (s - begin) % count)
            for s, f in readers[t].items()
            if s != begin and f < first and (s - begin) % count < (stage - begin) % count
        ]
        apart.append((i, t, first, max(before, key=lambda entry: entry[1])[0] if before else -1))
    return tuple(apart)


def _shared_values(graph: Graph, layers: Layers) -> dict[int, int]:
    """The values that several other layers read and that are sent to them, each with the layer that makes it."""
    constant, layer_of = graph.constant_ops, layers.layer_of()
    shared = {}
    for op in graph:
        for t in op.results if op.index not in constant else ():
            if (
                graph.reader_count(t) > 1
                and len({layer_of[reader.index] for reader in graph.consumers(t)} - {layer_of[op.index]}) > 1
            ):
                shared[t] = layer_of[op.index]
    return shared


def crossings(
    graph: Graph,
    layers: Layers,
    externals: Sequence[Sequence[int]],
    value_of: Callable[[int], Value],
    returning: Mapping[int, Collection[int]],
) -> Iterator[Crossing]:
    """What layers read of others: the values that their segments make, and parameters and data where several read them.

    ``externals`` holds what each segment reads, see ``externals_of``, ``returning`` which layers give a tensor a gradient."""
    constant = graph.constant_ops
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


def results_of(graph: Graph, segment: Segment) -> tuple[int, ...]:
    """Tensors that a segment writes."""
    return graph.results(segment.ops)


def externals_of(graph: Graph, segment: Segment) -> tuple[int, ...]:
    """Tensors that a segment reads and does not write, in the order of first use."""
    return graph.externals(segment.ops)
