"""Low-rank adapters beside projections: x W + s (x A) B (LoRA, arXiv 2106.09685).

Patterns describe projections, with or without adapters. So they are matched where whatever reads the sum of a projection and an
adapter reads the projection alone, and the adapter follows the projection: if W is sharded by columns, so is B and A stays
whole; if W is sharded by rows, so is A and B stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from paddle_rbt_plugin.graph.graph import Graph, Op, Tensor

T = TypeVar("T")

_ON_THE_WAY = frozenset({"cast", "dropout", "scale", "multiply"})
"""What may happen to the input of an adapter, between its products, and to its result."""
_UNCHANGED = frozenset({"cast", "dropout"})
"""What may happen to the input of a projection."""


@dataclass(frozen=True)
class Adapter:
    """Positions of tensors: the projection's weight and result, A, B, and the sum; and of the ops that are the adapter's."""

    weight: int
    projected: int
    down: int
    up: int
    total: int
    ops: tuple[int, ...]

    def of_weights(self, of_dims: Sequence[T]) -> dict[int, tuple[T | None, T | None]]:
        """What is said of the dimensions of W, for those of A and B."""
        rows, columns = of_dims
        return {self.down: (rows, None), self.up: (None, columns)}


def find_adapters(graph: Graph) -> tuple[Adapter, ...]:
    """The adapters of a graph, in program order. Several of one projection are added one after the other."""
    found: dict[int, Adapter] = {}
    for op in graph.ops:
        if op.type == "add" and len(op.operands) == 2:
            for projected, branch in (op.operands, op.operands[::-1]):
                if adapter := _adapter(graph, op, projected, branch, found):
                    found[adapter.total] = adapter
                    break
    return tuple(found.values())


def without_adapters(graph: Graph, adapters: Sequence[Adapter]) -> Graph:
    """The graph in which what reads the sum with an adapter reads the projection alone, and adapters look like nothing that
    patterns know. All positions stay the same."""
    if not adapters:
        return graph
    alone: dict[int, int] = {}
    for adapter in adapters:
        alone[adapter.total] = alone.get(adapter.projected, adapter.projected)
    own = {op for adapter in adapters for op in adapter.ops}
    ops = list(graph.ops)
    for i, op in enumerate(ops):
        if i in own:
            ops[i] = replace(op, type=f"adapter.{op.type}")
        elif not alone.keys().isdisjoint(op.operands):
            ops[i] = replace(op, inputs={slot: tuple(alone.get(t, t) for t in ts) for slot, ts in op.inputs.items()})
    return graph.rewritten(graph.tensors, tuple(ops), graph.loss)


def _adapter(graph: Graph, total: Op, projected: int, branch: int, known: dict[int, Adapter]) -> Adapter | None:
    """The adapter whose result ``branch`` is added to a projection, if it is one."""
    own = [total.index]
    up = _product(graph, branch, own)
    down = up and _product(graph, up[0], own)
    first = projected
    while first in known:
        first = known[first].projected
    base = _projection(graph, first)
    if not (up and down and base) or _root(graph, down[0]) != _root(graph, base[0]):
        return None
    shapes = [graph.tensors[t].shape for t in (base[1], down[1], up[1])]
    (rows, columns), (inputs, rank), (again, outputs) = shapes
    if (rows, columns, rank) != (inputs, outputs, again) or rank >= min(rows, columns):
        return None
    return Adapter(base[1], projected, down[1], up[1], total.results[0], tuple(sorted(own)))


def _product(graph: Graph, tensor: int, passed: list[int]) -> tuple[int, int] | None:
    """The input and the weight of the product that ``tensor`` is, scaled perhaps; the ops passed are noted."""
    op = graph.producer(tensor)
    while op is not None and op.type in _ON_THE_WAY:
        passed.append(op.index)
        op = next((made for t in op.operands if (made := graph.producer(t)) is not None and made.operands), None)
    if op is None or op.type != "matmul" or any(op.attrs.get(name) for name in ("transpose_x", "transpose_y")):
        return None
    passed.append(op.index)
    weight = _root(graph, op.operands[1])
    return (op.operands[0], weight) if _is_weight(graph.tensors[weight]) else None


def _projection(graph: Graph, tensor: int) -> tuple[int, int] | None:
    """The input and the weight of a projection with this result, its bias perhaps added."""
    op = graph.producer(tensor)
    while op is not None and (op.type == "cast" or (op.type == "add" and any(_is_bias(graph, t) for t in op.operands))):
        op = next((made for t in op.operands if not _is_bias(graph, t) and (made := graph.producer(t)) is not None), None)
    return None if op is None else _product(graph, op.results[0], [])


def _root(graph: Graph, tensor: int) -> int:
    """The tensor before casts and dropout."""
    op = graph.producer(tensor)
    while op is not None and op.type in _UNCHANGED:
        tensor = op.operands[0]
        op = graph.producer(tensor)
    return tensor


def _is_weight(tensor: Tensor) -> bool:
    return tensor.kind == "param" and tensor.ndim == 2


def _is_bias(graph: Graph, tensor: int) -> bool:
    root = graph.tensors[_root(graph, tensor)]
    return root.kind == "param" and root.ndim == 1
