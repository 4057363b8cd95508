"""What makes two ops, or two stretches of ops, structurally equal: everything but names, scopes and random seeds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np

from paddle_rbt_plugin.graph.graph import Graph, Op

# Paddle numbers the seeds of random ops; two dropouts are alike whatever theirs.
MEANINGLESS_ATTRS = frozenset({"seed", "fix_seed", "rng_name"})


def op_tokens(graph: Graph) -> np.ndarray:
    """One integer per op, equal for ops of the same type, attributes, and shapes and dtypes of operands and results."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(_token(graph, op), len(numbers)) for op in graph.ops], dtype=np.int64)


def _token(graph: Graph, op: Op) -> Hashable:
    def slots(of: dict[str, tuple[int, ...]]) -> Hashable:
        return tuple(
            (name, tuple((graph.tensors[t].kind == "param", graph.tensors[t].shape, graph.tensors[t].dtype) for t in tensors))
            for name, tensors in of.items()
        )

    attrs = tuple(sorted((k, repr(v)) for k, v in op.attrs.items() if k not in MEANINGLESS_ATTRS))
    return op.type, attrs, slots(dict(op.inputs)), slots(dict(op.outputs))


def wiring(graph: Graph, ops: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """How ops are connected, whatever their place in the graph: per op its operands and results, each tensor replaced by
    the number of its first appearance. Equal tokens and equal wiring make two stretches of ops structurally equal."""
    numbers: dict[int, int] = {}
    return tuple(
        tuple(numbers.setdefault(t, len(numbers)) for t in (*graph.ops[i].operands, *graph.ops[i].results)) for i in ops
    )


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
