"""Finds the layers of a model in its graph, from structure alone.

Transformer layers are a *tandem repeat*: a stretch of ops that follows itself, op for op. Equal ops are not enough, since
the projections of query, key and value repeat as well: the blocks of a model are also wired alike and *chained*, each
reading a result of the one before.

Where a repeat begins is a matter of choice, for every rotation of it is a repeat too, as long as the ops around it allow.
The boundary between two layers is where the least data crosses: one tensor after a residual addition, two elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paddle_rbt_plugin.graph.graph import Graph, Tensor
from paddle_rbt_plugin.layers.layers import Layers, Segment
from paddle_rbt_plugin.layers.structure import external_inputs, op_tokens, wiring

# A model's main repeat is most of it. Less than this share of all ops is some detail of a model with one layer.
MAIN_SHARE = 0.25
# What else has at least this share of a main block's parameters is a layer too: the decoder's blocks beside the encoder's.
LAYER_SHARE = 0.5


def cluster_layers(graph: Graph) -> Layers:
    """The layers of a model: its repeated blocks, with the embedding attached to the first and head and loss to the last.

    n repeated blocks make n layers; several different repeats (encoder and decoder) follow each other, and a block that
    differs from its neighbours (a first one without experts, or with a position bias) is a layer too. A model that repeats
    nothing is one layer. Scopes and names play no part."""
    return _Clustering(graph).layers()


@dataclass(frozen=True)
class _Stretch:
    """Ops [start, stop), in which every op equals the one ``period`` later; ``count`` times the period fit."""

    start: int
    stop: int
    period: int

    @property
    def count(self) -> int:
        return (self.stop - self.start) // self.period

    @property
    def covered(self) -> int:
        return self.count * self.period


class _Clustering:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.tokens = op_tokens(graph)
        self.crossing = _crossing_bytes(graph)
        self.weights = np.array([max((t.numel for t in _params(graph, i)), default=0) for i in range(len(graph.ops))])

    def layers(self) -> Layers:
        blocks = self.find_blocks()
        segments: list[tuple[range, int, bool]] = []
        end = 0
        for layer, block in enumerate(blocks):
            if block.start > end:
                segments.append((range(end, block.start), layer, False))
            segments.append((block, layer, True))
            end = block.stop
        if end < len(self.graph.ops):
            segments.append((range(end, len(self.graph.ops)), max(0, len(blocks) - 1), not blocks))
        kinds: dict[object, int] = {}
        return Layers(
            tuple(
                Segment(tuple(ops), layer, is_block, kinds.setdefault(self.structure(ops), len(kinds)))
                for ops, layer, is_block in segments
            )
        )

    def structure(self, ops: range) -> object:
        gradients = tuple(self.graph.tensors[t].stop_gradient for t in external_inputs(self.graph, ops))
        return tuple(self.tokens[ops.start : ops.stop]), wiring(self.graph, ops), gradients

    def find_blocks(self) -> list[range]:
        """The blocks of all layers, in order."""
        total = len(self.graph.ops)
        main = self.best_repeat(range(total))
        if not main or sum(map(len, main)) < MAIN_SHARE * total:
            return []
        enough = max(1.0, LAYER_SHARE * self.param_bytes(main[0]))
        before = self.more_blocks(range(main[0].start), enough)
        after = self.more_blocks(range(main[-1].stop, total), enough)
        return self.with_odd_blocks([*before, *main, *after], enough)

    def more_blocks(self, ops: range, enough: float) -> list[range]:
        """Blocks of further repeats that hold at least ``enough`` bytes of parameters."""
        repeat = self.best_repeat(ops)
        if not repeat or sum(map(self.param_bytes, repeat)) < enough:
            return []
        before, after = range(ops.start, repeat[0].start), range(repeat[-1].stop, ops.stop)
        return [*self.more_blocks(before, enough), *repeat, *self.more_blocks(after, enough)]

    def with_odd_blocks(self, blocks: list[range], enough: float) -> list[range]:
        """The blocks, and every stretch before or between them that holds as many parameters as a block. What follows
        the last one is left alone, for there a head would look like a block."""
        result: list[range] = []
        for block in blocks:
            gap = range(result[-1].stop if result else 0, block.start)
            if self.param_bytes(gap) >= enough:
                result.append(gap)
            result.append(block)
        return result

    def param_bytes(self, ops: range) -> int:
        """Bytes of the parameters that ops read, tables that are only looked up left out."""
        read = {t.index: t.nbytes for i in ops if self.graph.ops[i].type != "embedding" for t in _params(self.graph, i)}
        return sum(read.values())

    def best_repeat(self, ops: range) -> list[range]:
        """The blocks of the repeat that covers most of ``ops``, in the smallest blocks; empty if there is none."""
        for stretch in sorted(self.stretches(ops), key=lambda s: (-s.covered, s.period, s.start)):
            blocks = self.chained_blocks(stretch)
            if blocks:
                return blocks
        return []

    def stretches(self, ops: range) -> Iterator[_Stretch]:
        tokens = self.tokens[ops.start : ops.stop]
        places = np.flatnonzero(self.weights[ops.start : ops.stop])
        for period in sorted(_periods(tokens[places], places)):
            for start, equal in _runs(tokens, period):
                if np.searchsorted(places, start) < np.searchsorted(places, start + period):
                    yield _Stretch(ops.start + start, ops.start + start + equal + period, period)

    def chained_blocks(self, stretch: _Stretch) -> list[range]:
        """The longest row of blocks in a stretch that are wired alike and chained; empty if it has less than two."""
        start, period = self.first_boundary(stretch), stretch.period
        blocks = [range(start + k * period, start + (k + 1) * period) for k in range(stretch.count)]
        wirings = [wiring(self.graph, block) for block in blocks]
        best, row = blocks[:1], blocks[:1]
        for k in range(1, len(blocks)):
            joined = wirings[k] == wirings[k - 1] and self.reads(blocks[k], blocks[k - 1])
            row = [*row, blocks[k]] if joined else [blocks[k]]
            best = max(best, row, key=len)
        return best if len(best) > 1 else []

    def first_boundary(self, stretch: _Stretch) -> int:
        """Where the first block begins: where least crosses, and rather before a large weight than inside a Linear."""

        def cost(start: int) -> tuple[int, int, int]:
            boundaries = slice(start + stretch.period, start + stretch.covered, stretch.period)
            return int(self.crossing[boundaries].sum()), -int(self.weights[start]), start

        return min(range(stretch.start, stretch.stop - stretch.covered + 1), key=cost)

    def reads(self, block: range, previous: range) -> bool:
        producers = (self.graph.producer(t) for i in block for t in self.graph.ops[i].operands)
        return any(op is not None and op.index in previous for op in producers)


def _runs(tokens: np.ndarray, period: int) -> Iterator[tuple[int, int]]:
    """Start and length of each run of at least ``period`` tokens that equal those one ``period`` later."""
    different = np.flatnonzero(tokens[period:] != tokens[:-period])
    edges = np.concatenate(([-1], different, [len(tokens) - period]))
    equal = np.diff(edges) - 1
    for i in np.flatnonzero(equal >= period):
        yield int(edges[i]) + 1, int(equal[i])


def _periods(tokens: np.ndarray, places: np.ndarray) -> set[int]:
    """The periods with which a stretch of ops may repeat that holds ops with parameters; ``tokens`` are those of all such ops
    and ``places`` their positions. Where ops repeat, these few repeat among themselves."""
    found: set[int] = set()
    for count in range(1, len(tokens) // 2 + 1):
        for start, equal in _runs(tokens, count):
            found.update((places[start + count : start + count + equal] - places[start : start + equal]).tolist())
    return found


def _params(graph: Graph, op: int) -> list[Tensor]:
    return [t for t in graph.op_inputs(graph.ops[op]) if t.kind == "param"]


def _crossing_bytes(graph: Graph) -> np.ndarray:
    """Per op, the bytes of intermediate values that were written before it and are read by it or after it."""
    change = np.zeros(len(graph.ops) + 1, dtype=np.int64)
    for op in graph.ops:
        for t in op.results:
            consumers = graph.consumers(t)
            if consumers:
                change[op.index + 1] += graph.tensors[t].nbytes
                change[consumers[-1].index + 1] -= graph.tensors[t].nbytes
    return np.cumsum(change)[:-1]
