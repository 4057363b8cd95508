"""Experts that are computed one by one, each on the tokens that chose it, as the mixture that they are.

A traced loop over experts is a chain of branches: tokens are gathered at coordinates that depend on the router's choice, pass
an expert, and are added to the result at the same coordinates. ``fold_mixtures`` replaces the branches by one, whose weights
are stacked, [experts, in, out], and which exchanges tokens as GShard does (arXiv 2006.16668, section 2.2): by products with
one-hot matrices, for each group of tokens. Patterns match it and completion divides it like experts that are written that way.

The result says what the model computes if the load is balanced. It is a graph for planning, for which there is no program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paddle_rbt_plugin.graph.graph import Graph, Op, Tensor

Shape = tuple[int, ...]
_GROUP = 128
"""Tokens of a group, about: the products with one-hot matrices are then a few per cent of the work of an expert."""


@dataclass(frozen=True)
class Places:
    """How many tokens an expert takes: ``room`` of each of ``groups`` groups of tokens."""

    groups: int
    group: int
    """Tokens of a group."""
    room: int

    @property
    def count(self) -> int:
        return self.groups * self.room


def places(tokens: int, load: float, batch: int | None = None) -> Places:
    """The places of an expert that each of ``tokens`` chooses with probability ``load``: groups are pieces of a sample, of at
    least ``_GROUP`` tokens if possible, for which the fewest places stay empty."""
    piece = tokens // batch if batch and tokens % batch == 0 else tokens
    divisors = [d for d in range(1, min(piece, 4 * _GROUP) + 1) if piece % d == 0]
    large = [d for d in divisors if d >= _GROUP] or [divisors[-1]]

    def empty(group: int) -> float:
        return math.ceil(group * load) / (group * load)

    group = min(large, key=lambda d: (round(empty(d), 2), d))
    return Places(tokens // group, group, max(1, math.ceil(group * load)))


@dataclass(frozen=True)
class Dispatch:
    """Where tokens are chosen for an expert: positions of tensors."""

    coordinates: int
    """[places, dimensions of the mask]."""
    mask: int
    """What is not zero for the tokens that are chosen; -1 if the graph has no such tensor."""
    places: Places


@dataclass(frozen=True)
class Mixture:
    """A mixture that was folded."""

    experts: int
    places: Places


def fold_mixtures(graph: Graph, dispatches: Sequence[Dispatch]) -> tuple[Graph, tuple[Mixture, ...]]:
    """The graph with every loop over experts folded, and these mixtures. A loop whose branches differ, or hold ops that are not
    known, stays as it is."""
    folded = []
    building = _Building(graph, dispatches)
    for accumulations in building.loops():
        fold = _Fold(building, accumulations)
        try:
            folded.append(fold.run())
        except _Irregular:
            fold.undo()
    return (building.graph(), tuple(folded)) if folded else (graph, ())


class _Irregular(Exception):
    """Branches differ, or hold an op that cannot be computed for all experts at once."""


_VALUES = ("add_value", "updates", "value", "values")
_ACCUMULATE = frozenset({"index_add", "scatter", "scatter_nd_add", "put_along_axis", "index_put", "index_elementwise_put"})
_GATHER = frozenset({"gather", "gather_nd", "index_select", "index_elementwise_get", "take_along_axis", "embedding"})
_OF_COORDINATES = frozenset(
    {"unsqueeze", "squeeze", "reshape", "cast", "broadcast_tensors", "assign", "expand", "flatten", "share_data"}
)


class _Building:
    """A graph of which loops are replaced: tensors are appended, ops inserted before others and taken out."""

    def __init__(self, graph: Graph, dispatches: Sequence[Dispatch]):
        self.serial = graph
        self.dispatches = {d.coordinates: d.places for d in dispatches}
        self.masks = {d.mask: d.coordinates for d in dispatches if d.mask >= 0 and graph.tensors[d.mask].ndim == 1}
        self.tensors = list(graph.tensors)
        self.added: dict[int, list[Op]] = {}
        self.gone: set[int] = set()
        self.renamed: list[tuple[int, frozenset[int], int]] = []
        """After the op at a position, these tensors are read as that one."""
        self._coordinates: dict[int, tuple[int, tuple[int, ...]] | None] = {}

    def loops(self) -> Iterable[list[Op]]:
        """The accumulations of each loop, in program order."""
        found: dict[int, list[Op]] = {}
        root: dict[int, int] = {}
        for op in self.serial.ops:
            if op.type not in _ACCUMULATE or self.index_of(op) is None:
                continue
            into = root.get(op.operands[0], op.operands[0])
            root[op.results[0]] = into
            found.setdefault(into, []).append(op)
        return [ops for ops in found.values() if len(ops) > 1]

    def index_of(self, op: Op) -> tuple[int, tuple[int, ...]] | None:
        """The dispatch and the coordinates at which an op gathers or accumulates; None for another op."""
        slots = [operands for slot, operands in op.inputs.items() if slot.startswith("ind")]
        found = [self.coordinates(t) for operands in slots for t in operands]
        if not found or any(f is None for f in found) or len({f[0] for f in found if f is not None}) != 1:
            return None
        return next(f[0] for f in found if f is not None), tuple(c for f in found if f is not None for c in f[1])

    def coordinates(self, tensor: int) -> tuple[int, tuple[int, ...]] | None:
        """The dispatch that a tensor of indices comes from, and its coordinates, -1 for others; None for another tensor."""
        if tensor not in self._coordinates:
            self._coordinates[tensor] = self._find(tensor)
        return self._coordinates[tensor]

    def _find(self, tensor: int) -> tuple[int, tuple[int, ...]] | None:
        found = self.serial.tensors[tensor]
        if tensor in self.dispatches:
            return tensor, tuple(range(found.shape[-1]))
        if tensor in self.masks:
            return self.masks[tensor], (0,)
        op = self.serial.producer(tensor)
        if op is None or not found.dtype.startswith("int"):
            return None
        if op.type == "slice":
            source = self.coordinates(op.operands[0])
            if source is None or op.attrs["axes"] != (self.serial.tensors[op.operands[0]].ndim - 1,):
                return source
            (start,), (end,) = op.attrs["starts"], op.attrs["ends"]
            return source[0], source[1][start:end]
        if op.type == "broadcast_tensors":
            return self.coordinates(op.operands[op.results.index(tensor)])
        if op.type in _OF_COORDINATES:
            return self.coordinates(op.operands[0])
        if op.type in ("stack", "concat"):
            parts = [self.coordinates(t) for t in op.operands]
            known = [p for p in parts if p is not None]
            if known and len({p[0] for p in known}) == 1:
                return known[0][0], tuple(c for p in parts for c in (p[1] if p is not None else (-1,)))
        return None

    def graph(self) -> Graph:
        """The graph as it is now, without what nothing reads any more."""
        ops: list[Op] = []
        for op in self.serial.ops:
            ops += self.added.get(op.index, ())
            if op.index not in self.gone:
                ops.append(self._reading(op))
        ops = self._live(ops)
        used = {t for op in ops for t in (*op.operands, *op.results)}
        was_used = {t for op in self.serial.ops for t in op.operands}
        kept = [t for t in self.tensors if t.index in used or (t.kind != "var" and t.index not in was_used)]
        number = {t.index: i for i, t in enumerate(kept)}

        def numbered(slots: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
            return {slot: tuple(number[t] for t in some) for slot, some in slots.items()}

        made = (replace(op, index=i, inputs=numbered(op.inputs), outputs=numbered(op.outputs)) for i, op in enumerate(ops))
        loss = None if self.serial.loss is None else number[self.serial.loss]
        return self.serial.rewritten(tuple(replace(t, index=i) for i, t in enumerate(kept)), tuple(made), loss)

    def _reading(self, op: Op) -> Op:
        inputs = dict(op.inputs)
        for last, old, new in self.renamed:
            if op.index > last:
                inputs = {slot: tuple(new if t in old else t for t in some) for slot, some in inputs.items()}
        return op if inputs == op.inputs else replace(op, inputs=inputs)

    def _live(self, ops: list[Op]) -> list[Op]:
        """Without the ops whose results are read no more, nor those of which conditions were made while the loop was traced."""
        readers: dict[int, int] = {}
        for op in ops:
            for t in op.operands:
                readers[t] = readers.get(t, 0) + 1
        was_read = {t for op in self.serial.ops for t in op.operands}
        live: list[Op] = []
        for op in reversed(ops):
            unread = not any(readers.get(t) or t == self.serial.loss for t in op.results)
            orphaned = any(t in was_read for t in op.results)
            decided = all(self.tensors[t].numel == 1 or self.tensors[t].dtype == "bool" for t in op.results)
            if unread and (orphaned or decided or op.type.startswith("set_value")):
                for t in op.operands:
                    readers[t] -= 1
            else:
                live.append(op)
        return live[::-1]


@dataclass(frozen=True)
class _Value:
    """A tensor of the new branch: with the experts as its first dimension, or the same for all of them."""

    tensor: int
    stacked: bool


class _Fold:
    """One loop that is replaced."""

    def __init__(self, building: _Building, accumulations: Sequence[Op]):
        self.building, self.graph = building, building.serial
        self.accumulations = accumulations
        self.count = len(accumulations)
        self.tensors_before = len(building.tensors)
        self.ops: list[Op] = []
        self.values: dict[tuple[int, ...], _Value] = {}
        self.sent: dict[int, int] = {}
        self.last = accumulations[-1]
        self.name = f"{accumulations[0].name}.experts"

    def undo(self) -> None:
        del self.building.tensors[self.tensors_before :]

    def run(self) -> Mixture:
        first = self.accumulations[0]
        found = [self.building.index_of(op) for op in self.accumulations]
        dispatches = [f[0] for f in found if f is not None]
        if len(set(dispatches)) < self.count or len({self.building.dispatches[d] for d in dispatches}) != 1:
            raise _Irregular
        self.places = self.building.dispatches[dispatches[0]]
        into = self.building.tensors[first.operands[0]]
        self.token = found[0][1][0] if found[0] is not None else 0
        if into.shape[0] != self.places.groups * self.places.group:
            raise _Irregular
        self.dtype = into.dtype
        self._slots(dispatches[0])
        branch = self.stacked(tuple(self._value_of(op) for op in self.accumulations))
        if not branch.stacked:
            raise _Irregular
        combined = self._combine(branch.tensor, into)
        read = frozenset({first.operands[0], *(op.results[0] for op in self.accumulations)})
        self.building.added.setdefault(self.last.index, []).extend(self.ops)
        self.building.gone.update(op.index for op in self.accumulations)
        self.building.renamed.append((self.last.index, read, combined))
        return Mixture(self.count, self.places)

    @staticmethod
    def _value_of(op: Op) -> int:
        return next(some[0] for slot, some in op.inputs.items() if slot in _VALUES and some)

    # Building

    def add(
        self,
        type_: str,
        inputs: Mapping[str, tuple[int, ...]],
        results: Sequence[tuple[Shape, str]],
        attrs: Mapping[str, Any],
        slots: Sequence[str] = ("out",),
    ) -> tuple[int, ...]:
        """Appends an op; returns its results, of these shapes and dtypes, in one slot or one each."""
        tensors, name = self.building.tensors, f"{self.name}.{len(self.ops)}"
        stop = all(tensors[t].stop_gradient for some in inputs.values() for t in some)
        made = tuple(range(len(tensors), len(tensors) + len(results)))
        for at, (shape, dtype) in zip(made, results, strict=True):
            is_number = dtype.startswith(("float", "bfloat"))
            tensors.append(Tensor(at, f"{name}.out{at - made[0] or ''}", shape, dtype, "var", stop or not is_number))
        outputs = {slots[0]: made} if len(slots) != len(made) else {slot: (t,) for slot, t in zip(slots, made, strict=True)}
        self.ops.append(Op(-1, name, type_, dict(inputs), outputs, dict(attrs), self.last.scope, self.last.source))
        return made

    def one(self, type_: str, inputs: Mapping[str, int], shape: Shape, attrs: Mapping[str, Any], dtype: str = "") -> int:
        given = {slot: (t,) for slot, t in inputs.items()}
        return self.add(type_, given, [(shape, dtype or self.building.tensors[next(iter(inputs.values()))].dtype)], attrs)[0]

    def reshape(self, x: int, shape: Shape) -> int:
        before = next((op for op in self.ops if op.type == "reshape" and op.results == (x,)), None)
        source = x if before is None else before.operands[0]
        if shape in (self.building.tensors[x].shape, self.building.tensors[source].shape):
            return x if self.building.tensors[x].shape == shape else source
        return self.one("reshape", {"x": source}, shape, {"shape": shape})

    def cast(self, x: int, dtype: str) -> int:
        found = self.building.tensors[x]
        return x if found.dtype == dtype else self.one("cast", {"x": x}, found.shape, {"dtype": dtype}, dtype)

    def transpose(self, x: int, perm: Shape) -> int:
        shape = self.building.tensors[x].shape
        return self.one("transpose", {"x": x}, tuple(shape[p] for p in perm), {"perm": perm})

    def matmul(self, x: int, y: int, shape: Shape, transpose_x: bool = False) -> int:
        return self.one("matmul", {"x": x, "y": y}, shape, {"transpose_x": transpose_x, "transpose_y": False})

    def part(self, x: int, axis: int, start: int, end: int) -> int:
        """The elements from ``start`` to ``end`` along a dimension."""
        shape = self.building.tensors[x].shape
        attrs = {"axes": (axis,), "infer_flags": (1,), "decrease_axis": (), "starts": (start,), "ends": (end,)}
        return self.one("slice", {"input": x}, (*shape[:axis], end - start, *shape[axis + 1 :]), attrs)

    # Sending tokens to experts and back

    def _slots(self, dispatch: int) -> None:
        """One-hot rows that say which places a token of a group takes, [groups, group, experts * room]."""
        router = self._router(dispatch)
        scores = self.building.tensors[router.operands[0]]
        p, dtype = self.places, scores.dtype
        grouped = (p.groups, p.group, self.count)
        if math.prod(scores.shape) != math.prod(grouped):
            raise _Irregular
        ranked = self.reshape(scores.index, grouped)
        if router.type == "topk":
            chosen = self.building.tensors[router.results[0]].shape[-1]
            best = self.reshape(router.results[0], (p.groups, p.group, chosen))
            worst = self.part(best, 2, chosen - 1, chosen)
        else:
            worst = self.one("max", {"x": ranked}, (p.groups, p.group, 1), {"axis": (2,), "keepdim": True})
        marks = self.cast(self.one("greater_equal", {"x": ranked, "y": worst}, grouped, {}, "bool"), dtype)
        counted = {"flatten": False, "exclusive": False, "reverse": False, "axis": 1}
        place = self.one("multiply", {"x": self.one("cumsum", {"x": marks}, grouped, counted), "y": marks}, grouped, {})
        hot = self.one(
            "one_hot", {"x": self.cast(place, "int64")}, (*grouped, p.room + 1), {"num_classes": p.room + 1}, "float32"
        )
        slots = self.reshape(self.part(hot, 3, 1, p.room + 1), (p.groups, p.group, self.count * p.room))
        self.slots = self.cast(slots, self.dtype)

    def _router(self, dispatch: int) -> Op:
        """The nearest choice by scores, one per token and expert, before a dispatch."""
        found, waiting = set(), [dispatch]
        while waiting:
            op = self.graph.producer(waiting.pop(0))
            if op is None or op.index in found:
                continue
            found.add(op.index)
            scores = self.graph.tensors[op.operands[0]] if op.operands else None
            if op.type in ("topk", "argmax") and scores is not None and scores.ndim > 1 and scores.shape[-1] == self.count:
                return op
            waiting += op.operands
        raise _Irregular

    def dispatch(self, x: int) -> int:
        """[tokens, ...] to [experts, places, ...]."""
        if x not in self.sent:
            found, p = self.building.tensors[x], self.places
            rest = found.shape[1:]
            size = math.prod(rest)
            tokens = self.cast(self.reshape(x, (p.groups, p.group, size)), self.dtype)
            sent = self.matmul(self.slots, tokens, (p.groups, self.count * p.room, size), transpose_x=True)
            sent = self.transpose(self.reshape(sent, (p.groups, self.count, p.room, size)), (1, 0, 2, 3))
            self.sent[x] = self.reshape(sent, (self.count, p.count, *rest))
        return self.sent[x]

    def _combine(self, value: int, into: Tensor) -> int:
        """[experts, places, ...] to [tokens, ...], added to ``into``."""
        p, size = self.places, math.prod(into.shape[1:])
        if self.building.tensors[value].numel != self.count * p.count * size:
            raise _Irregular
        value = self.cast(self.reshape(value, (self.count, p.groups, p.room, size)), self.dtype)
        back = self.reshape(self.transpose(value, (1, 0, 2, 3)), (p.groups, self.count * p.room, size))
        mixed = self.reshape(self.matmul(self.slots, back, (p.groups, p.group, size)), into.shape)
        return self.one("add", {"x": into.index, "y": mixed}, into.shape, {})

    # The branch of all experts

    def stacked(self, tensors: tuple[int, ...]) -> _Value:
        """What the branches' tensors become, one of each branch."""
        if tensors not in self.values:
            self.values[tensors] = self._stacked(tensors)
        return self.values[tensors]

    def _stacked(self, tensors: tuple[int, ...]) -> _Value:
        found = [self.graph.tensors[t] for t in tensors]
        first = found[0]
        if any((t.shape, t.dtype, t.kind) != (first.shape, first.dtype, first.kind) for t in found):
            raise _Irregular
        if len(set(tensors)) == 1 and not self._is_dispatched(tensors[0]):
            return _Value(tensors[0], False)
        if first.kind == "param":
            return _Value(self._stacked_weight(found), True)
        ops = [self.graph.producer(t) for t in tensors]
        branches = [op for op in ops if op is not None]
        if len(branches) < self.count or len({op.type for op in branches}) != 1:
            raise _Irregular
        result = branches[0].results.index(tensors[0])
        if branches[0].type in _GATHER and self.building.index_of(branches[0]) is not None:
            return self._gathered(branches[0])
        row = self._row(branches)
        if row is not None:
            return _Value(row, True)
        if len({op.spelt_attrs for op in branches}) != 1:
            raise _Irregular
        made = self._for_all(branches)
        for i, results in enumerate(zip(*(op.results for op in branches), strict=True)):
            self.values[results] = _Value(made[i], True)
        return _Value(made[result], True)

    def _is_dispatched(self, tensor: int) -> bool:
        op = self.graph.producer(tensor)
        return op is not None and op.type in _GATHER and self.building.index_of(op) is not None

    def _stacked_weight(self, weights: list[Tensor]) -> int:
        tensors = self.building.tensors
        first, last, at = weights[0], weights[-1], len(tensors)
        shape = (self.count, *first.shape)
        path = _common(first.structured_name, last.structured_name)
        tensors.append(replace(first, index=at, name=f"{first.name}..{last.name}", shape=shape, structured_name=path))
        return at

    def _gathered(self, op: Op) -> _Value:
        """What an op gathers for the tokens of an expert."""
        index = self.building.index_of(op)
        x = op.operands[0]
        found, result = self.building.tensors[x], self.graph.tensors[op.results[0]]
        tokens = self.places.groups * self.places.group
        if (
            index is None
            or index[1][0] != self.token
            or found.shape[0] != tokens
            or not found.dtype.startswith(("float", "bfloat"))
        ):
            raise _Irregular
        sent, shape = self.dispatch(x), (self.count, *result.shape)
        if self.building.tensors[sent].numel == math.prod(shape):
            return _Value(self.reshape(sent, shape), True)
        others = len(index[1]) - 1
        if others < 1:
            raise _Irregular
        axes = tuple(range(2, 2 + others))
        left = tuple(n for i, n in enumerate(self.building.tensors[sent].shape) if i not in axes)
        picked = self.one("sum", {"x": sent}, left, {"dtype": "undefined", "keepdim": False, "axis": axes})
        return _Value(self.reshape(picked, shape), True)

    def _row(self, branches: Sequence[Op]) -> int | None:
        """The tensor of which each branch reads a row of its own, with the rows as its first dimension; None for other ops."""
        first = branches[0]
        sources = {op.operands[0] for op in branches if op.operands}
        if len(sources) != 1:
            return None
        source, result = self.building.tensors[next(iter(sources))], self.graph.tensors[first.results[0]]
        if first.type == "slice" and len(first.attrs["axes"]) == 1:
            axis = first.attrs["axes"][0] % source.ndim
            rows = [op.attrs["starts"][0] for op in branches]
        elif first.type in _GATHER and len(first.operands) > 1:
            axis = int(first.attrs.get("axis", 0)) % source.ndim
            rows = [self._constant(op.operands[-1]) for op in branches]
        else:
            return None
        if rows != list(range(self.count)) or source.shape[axis] != self.count:
            return None
        at = source.index
        if axis:
            at = self.transpose(at, (axis, *(i for i in range(source.ndim) if i != axis)))
        return self.reshape(at, (self.count, *result.shape))

    def _constant(self, tensor: int) -> Any:
        op = self.graph.producer(tensor)
        while op is not None and op.operands and op.type in _OF_COORDINATES:
            op = self.graph.producer(op.operands[0])
        if op is None or (op.operands and op.type != "assign_value"):
            return None
        value = op.attrs.get("values", op.attrs.get("value"))
        value = value[0] if isinstance(value, tuple) and len(value) == 1 else value
        return int(value) if isinstance(value, (int, float)) else None

    def _for_all(self, branches: Sequence[Op]) -> tuple[int, ...]:
        """The op of all branches, on stacked operands."""
        first = branches[0]
        tensors = self.building.tensors
        columns = zip(*(op.operands for op in branches), strict=True)
        values = dict(zip(first.operands, (self.stacked(column) for column in columns), strict=True))
        rank = max((self.graph.tensors[t].ndim for t in first.operands), default=0)
        attrs = _shifted(
            first, [self.graph.tensors[t] for t in first.operands], [self.graph.tensors[t] for t in first.results], self.count
        )
        inputs: dict[str, tuple[int, ...]] = {}
        for slot, some in first.inputs.items():
            inputs[slot] = tuple(self._aligned(t, values[t], rank, first.type) for t in some)
        results = [self.graph.tensors[t] for t in first.results]
        if first.type == "matmul" and all(math.prod(self.graph.tensors[t].shape[:-2]) == 1 for t in first.operands):
            return self._product(first, inputs, results[0])
        made = self.add(first.type, inputs, [((self.count, *t.shape), t.dtype) for t in results], attrs, tuple(first.outputs))
        for at, serial in zip(made, results, strict=True):
            tensors[at] = replace(tensors[at], stop_gradient=serial.stop_gradient)
        return made

    def _product(self, op: Op, inputs: Mapping[str, tuple[int, ...]], result: Tensor) -> tuple[int, ...]:
        """The products of matrices, one for each expert."""
        x, y = (
            self.reshape(some[0], (self.count, *self.graph.tensors[op.inputs[slot][0]].shape[-2:]))
            if self.building.tensors[some[0]].shape[0] == self.count and self.building.tensors[some[0]].ndim > 2
            else some[0]
            for slot, some in inputs.items()
        )
        shape = (self.count, *result.shape)
        made = self.one("matmul", {"x": x, "y": y}, (self.count, *result.shape[-2:]), op.attrs)
        return (self.reshape(made, shape),)

    def _aligned(self, serial: int, value: _Value, rank: int, type_: str) -> int:
        """An operand with as many dimensions as broadcasting to the others of its op needs."""
        shape = self.graph.tensors[serial].shape
        if type_ in _LISTS and not value.stacked:
            raise _Irregular
        if type_ not in _BROADCASTS or not value.stacked or len(shape) == rank:
            return value.tensor
        if type_ == "matmul" and len(shape) < 2:
            raise _Irregular
        return self.reshape(value.tensor, (self.count, *(1,) * (rank - len(shape)), *shape))


_BROADCASTS = frozenset(
    [
        "add",
        "subtract",
        "multiply",
        "divide",
        "elementwise_pow",
        "maximum",
        "minimum",
        "matmul",
        "greater_than",
        "less_than",
        "greater_equal",
        "less_equal",
        "equal",
        "not_equal",
        "logical_and",
        "logical_or",
        "where",
        "fmax",
        "fmin",
    ]
)
_LISTS = frozenset({"concat", "stack"})
_BY_ELEMENT = frozenset(
    [
        "cast",
        "silu",
        "swish",
        "gelu",
        "relu",
        "sigmoid",
        "tanh",
        "exp",
        "scale",
        "clip",
        "pow",
        "sqrt",
        "rsqrt",
        "square",
        "abs",
        "dropout",
        "leaky_relu",
        "relu6",
        "hardswish",
        "softplus",
        "swiglu",
        "bmm",
        "assign",
        "full_like",
        "log",
        "sin",
        "cos",
        "share_data",
    ]
)
_LAST_AXIS = frozenset({"layer_norm", "rms_norm"})
_AXES = {
    "split_with_num": "axis", "split": "axis", "concat": "axis", "softmax": "axis", "sum": "axis", "mean": "axis",
    "max": "axis", "min": "axis", "unsqueeze": "axis", "squeeze": "axis", "slice": "axes", "strided_slice": "axes",
    "transpose": "perm", "stack": "axis", "cumsum": "axis",
}  # fmt: skip


def _shifted(op: Op, operands: Sequence[Tensor], results: Sequence[Tensor], experts: int) -> dict[str, Any]:
    """The attributes of an op whose tensors have a new first dimension. Raises _Irregular for an op that is not known."""
    attrs = dict(op.attrs)
    if op.type in _BY_ELEMENT or op.type in _BROADCASTS:
        return attrs
    if op.type == "reshape":
        return attrs | {"shape": (experts, *results[0].shape)}
    if op.type == "expand":
        return attrs | {"shape": (experts, *results[0].shape)}
    if op.type in _LAST_AXIS:
        return attrs | {"begin_norm_axis": attrs["begin_norm_axis"] + 1}
    if op.type not in _AXES:
        raise _Irregular
    key = _AXES[op.type]
    given = attrs[key]
    ndim = operands[0].ndim
    if op.type == "transpose":
        return attrs | {key: (0, *(p % ndim + 1 for p in given))}
    many = given if isinstance(given, tuple) else (given,)
    if not many and op.type in ("sum", "mean", "max", "min"):
        many = tuple(range(ndim))
    moved = tuple(a + 1 if a >= 0 else a for a in many)
    attrs[key] = moved if isinstance(given, tuple) else moved[0]
    if attrs.get("decrease_axis"):
        attrs["decrease_axis"] = tuple(a + 1 if a >= 0 else a for a in attrs["decrease_axis"])
    return attrs


def _common(first: str, last: str) -> str:
    """The paths of the first and the last of a list of layers as one: ``experts.0-7.up.weight``."""
    a, b = first.split("."), last.split(".")
    if len(a) != len(b):
        return ""
    return ".".join(x if x == y else f"{x}-{y}" for x, y in zip(a, b, strict=True))
