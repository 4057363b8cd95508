"""Makes the graph of a deep model from that of a shallow one, since tracing takes time for every layer.

The second block is the template and the third is the witness: what the second reads and the third reads as well is shared
by all blocks (masks, rotary tables, tied weights), what they read from the block before is handed on, and parameters that
differ are a block's own. Names go on counting as they do from the second block to the third.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.graph.graph import Graph, Op, Tensor
from paddle_rbt_plugin.layers.layers import Layers
from paddle_rbt_plugin.layers.structure import external_inputs, wiring

Placed = tuple[int, int]
"""A tensor or an op of the new graph: its block and its place in the old graph. Copies of the template are counted from 1;
0 stands for everything that is kept."""


def repeat_layers(graph: Graph, layers: Layers, count: int) -> Graph:
    """The graph with ``count`` blocks instead of its own, as a trace of the deeper model gives it.

    ``layers`` holds one repeat of at least three blocks, ``count`` is at least 2. Parameters are named by going on with the
    numbers that Paddle gave them. Ops of the result have no ``source``, since there is no such program.

    Raises UnsupportedProgram if the blocks are too few, differ, do not follow each other, or read something that is neither
    shared, nor handed on by the block before, nor a parameter of their own."""
    return _Repetition(graph, layers, count).graph()


class _Repetition:
    def __init__(self, graph: Graph, layers: Layers, count: int):
        self.old, self.count = graph, count
        blocks = [block.ops for block in layers.blocks]
        self._check(layers, blocks)
        self.traced = len(blocks)
        self.template, self.witness = blocks[1:3]

        inputs = [external_inputs(graph, block) for block in blocks]
        results = [tuple(t for i in block for t in graph.ops[i].results) for block in blocks]
        # What the template reads from the first block, to the same result of the template.
        self.handed_on: dict[int, int] = {}
        own_inputs = self._sort_inputs(inputs, dict(zip(results[0], results[1], strict=True)))
        # What a block brings along: its own parameters and its results, in corresponding order.
        owned = [[*(row[j] for j in own_inputs), *result] for row, result in zip(inputs, results, strict=True)]
        self.owned = sorted(owned[1])
        self.to_witness = dict(zip(owned[1], owned[2], strict=True))
        self.from_last = dict(zip(owned[-1], owned[1], strict=True))
        self.replaced = {t for block in owned[1:] for t in block}

        # Ops and tensors of the new graph, in order.
        self.ops: list[Placed] = [(0, i) for i in range(self.template[0])]
        self.ops += [(k, i) for k in range(1, count) for i in self.template]
        self.ops += [(0, i) for i in range(blocks[-1][-1] + 1, len(graph.ops))]
        self.tensors = list(self._tensors())
        self.index = {placed: i for i, placed in enumerate(self.tensors)}
        self.series: dict[tuple[str, str], tuple[str, list[tuple[int, int]]]] = {}

    def _sort_inputs(self, inputs: list[tuple[int, ...]], counterpart: dict[int, int]) -> list[int]:
        """Places of the inputs that are a block's own parameters; fills in what is handed on. ``counterpart`` maps results
        of the first block to those of the template."""
        own = []
        for j, (t, u) in enumerate(zip(inputs[1], inputs[2], strict=True)):
            tensors = self.old.tensors[t], self.old.tensors[u]
            if t == u:
                continue
            if all(tensor.kind == "param" for tensor in tensors):
                own.append(j)
            elif counterpart.get(t) == u:
                self.handed_on[t] = u
            else:
                raise UnsupportedProgram(
                    f"cannot repeat the layers: {tensors[0].name!r} and {tensors[1].name!r}, which the second and the third "
                    "read in the same place, are neither shared, nor handed on, nor parameters of their own"
                )
        return own

    def _check(self, layers: Layers, blocks: list[tuple[int, ...]]) -> None:
        if len(blocks) < 3 or self.count < 2:
            raise UnsupportedProgram(f"at least 3 layers are needed to make at least 2, not {len(blocks)} to make {self.count}")
        ops = [i for block in blocks for i in block]
        alike = len({wiring(self.old, block) for block in blocks}) == 1 and len({s.kind for s in layers.blocks[1:]}) == 1
        if ops != list(range(ops[0], ops[-1] + 1)) or not alike:
            raise UnsupportedProgram("cannot repeat layers that differ, or that do not follow each other directly")

    def _tensors(self) -> Iterator[Placed]:
        kept = [t.index for t in self.old.tensors if t.index not in self.replaced]
        yield from ((0, t) for t in kept if t < self.owned[0])
        yield from ((k, t) for k in range(1, self.count) for t in self.owned)
        yield from ((0, t) for t in kept if t > self.owned[0])

    def resolve(self, block: int, tensor: int) -> int:
        """Index in the new graph of what an op of ``block`` knows as ``tensor``."""
        if block and tensor in self.replaced:
            return self.index[block, tensor]
        if block > 1 and tensor in self.handed_on:
            return self.index[block - 1, self.handed_on[tensor]]
        if tensor in self.from_last:
            return self.index[self.count - 1, self.from_last[tensor]]
        if tensor in self.replaced:
            raise UnsupportedProgram(
                f"cannot repeat the layers: {self.old.tensors[tensor].name!r} of one in the middle is read from outside"
            )
        return self.index[0, tensor]

    def graph(self) -> Graph:
        ops = tuple(self._ops())
        names = self._names(ops)
        tensors = tuple(
            replace(self.old.tensors[t], index=i, name=name, structured_name=structured)
            for i, ((_, t), (name, structured)) in enumerate(zip(self.tensors, names, strict=True))
        )
        repeated = [name for name, n in Counter(t.name for t in tensors).items() if n > 1]
        if repeated:
            raise UnsupportedProgram(f"cannot name the tensors of the repeated layers: {repeated[0]!r} would occur twice")
        return self.old.rewritten(tensors, ops, None if self.old.loss is None else self.resolve(0, self.old.loss))

    def _ops(self) -> Iterator[Op]:
        numbers: Counter[str] = Counter()
        witness = dict(zip(self.template, self.witness, strict=True))
        for index, (k, i) in enumerate(self.ops):
            op = self.old.ops[i]
            scope = self._go_on(op.scope, self.old.ops[witness[i]].scope, k) if k else op.scope
            yield Op(
                index,
                f"{op.type}_{numbers[op.type]}",
                op.type,
                {slot: tuple(self.resolve(k, t) for t in ts) for slot, ts in op.inputs.items()},
                {slot: tuple(self.resolve(k, t) for t in ts) for slot, ts in op.outputs.items()},
                op.attrs,
                scope,
            )
            numbers[op.type] += 1

    def _names(self, ops: tuple[Op, ...]) -> Iterator[tuple[str, str]]:
        """Name and structured name of every new tensor."""
        producers = {t: (self.old.ops[i].name, op.name) for (_, i), op in zip(self.ops, ops, strict=True) for t in op.results}
        for index, (k, t) in enumerate(self.tensors):
            tensor = self.old.tensors[t]
            if index in producers:
                before, now = producers[index]
                yield now + tensor.name.removeprefix(before), tensor.structured_name
            elif tensor.kind == "param":
                yield self._param(k, tensor)
            else:
                yield tensor.name, tensor.structured_name

    def _param(self, block: int, tensor: Tensor) -> tuple[str, str]:
        if not block:
            return self._count_on(tensor.name), tensor.structured_name
        witness = self.old.tensors[self.to_witness[tensor.index]]
        return (
            self._go_on(tensor.name, witness.name, block),
            self._go_on(tensor.structured_name, witness.structured_name, block),
        )

    def _go_on(self, second: str, third: str, block: int) -> str:
        """The name in block number ``block`` of what blocks 1 and 2 name ``second`` and ``third``."""
        if (second, third) not in self.series:
            self.series[second, third] = _series(second, third)
        text, numbers = self.series[second, third]
        return text % tuple([first + step * (block - 1) for first, step in numbers]) if numbers else second

    def _count_on(self, name: str) -> str:
        """Name of a parameter outside the blocks: Paddle numbers it after theirs if it was created after them."""
        for t in self.owned:
            stem, second, third = _difference(self.old.tensors[t].name, self.old.tensors[self.to_witness[t]].name)
            found = re.match(re.escape(stem) + r"(\d+)", name) if stem else None
            if found and int(found[1]) > third + (self.traced - 3) * (third - second):
                number = int(found[1]) + (self.count - self.traced) * (third - second)
                return f"{stem}{number}{name[found.end() :]}"
        return name


def _pieces(text: str) -> list[str]:
    """Text and numbers in turn."""
    return re.split(r"(\d+)", text)


def _series(second: str, third: str) -> tuple[str, list[tuple[int, int]]]:
    """How two names go on: a format, and for each number in it the first value and the step. No numbers for names that differ
    in more."""
    a, b = _pieces(second), _pieces(third)
    if a[::2] != b[::2]:
        return second, []
    numbers = [(int(x), int(y) - int(x)) for x, y in zip(a[1::2], b[1::2], strict=True)]
    return "%d".join(piece.replace("%", "%%") for piece in a[::2]), numbers


def _difference(second: str, third: str) -> tuple[str, int, int]:
    """The text before the first number in which two names differ, and the two numbers; empty text if there is none."""
    a, b = _pieces(second), _pieces(third)
    for i in range(1, min(len(a), len(b)), 2):
        if a[i] != b[i] and a[:i] == b[:i]:
            return "".join(a[:i]), int(a[i]), int(b[i])
    return "", 0, 0
