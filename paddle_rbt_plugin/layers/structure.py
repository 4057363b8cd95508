"""What makes two ops, or two stretches of ops, structurally equal: everything but names, scopes and random seeds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from paddle_rbt_plugin.graph.graph import Graph, Op

# Paddle numbers the seeds of random ops; two dropouts are alike whatever theirs.
MEANINGLESS_ATTRS = frozenset({"seed", "fix_seed", "rng_name"})


def op_tokens(graph: Graph) -> np.ndarray:
    """One integer per op, equal for ops of the same type, attributes, and shapes and dtypes of operands and results."""
    tensors = _numbered((t.kind == "param", t.shape, t.dtype) for t in graph.tensors)
    return np.array(_numbered(_token(op, tensors) for op in graph.ops), dtype=np.int64)


def _numbered(values: Iterable[Hashable]) -> list[int]:
    """One integer per value, equal for equal values."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


def _token(op: Op, tensors: Sequence[int]) -> Hashable:
    attrs = op.spelt_attrs
    if not MEANINGLESS_ATTRS.isdisjoint(op.attrs):
        attrs = tuple((name, value) for name, value in attrs if name not in MEANINGLESS_ATTRS)
    return op.type, attrs, _slots(op.inputs, tensors), _slots(op.outputs, tensors)


def _slots(of: Mapping[str, tuple[int, ...]], tensors: Sequence[int]) -> Hashable:
    return tuple([(name, *[tensors[t] for t in slot]) for name, slot in of.items()])


def wiring(graph: Graph, ops: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """How ops are connected, whatever their place in the graph: per op its operands and results, each tensor replaced by
    the number of its first appearance. Equal tokens and equal wiring make two stretches of ops structurally equal."""
    numbers: dict[int, int] = {}
    number = numbers.setdefault
    return tuple([tuple([number(t, len(numbers)) for t in (*op.operands, *op.results)]) for op in (graph.ops[i] for i in ops)])


def external_inputs(graph: Graph, ops: Iterable[int]) -> tuple[int, ...]:
    """Tensors that ops read and do not write, parameters and data included, in order of first appearance."""
    seen: set[int] = set()
    inputs = []
    for i in ops:
        op = graph.ops[i]
        for t in op.operands:
            if t not in seen:
                seen.add(t)
                inputs.append(t)
        seen.update(op.results)
    return tuple(inputs)
