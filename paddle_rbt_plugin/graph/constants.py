"""Which ops of a graph compute constants: they depend on no parameter, no input and no random number.

Masks, rotary tables and position ids are mostly made by such ops. Whoever reads what they make can compute it.
"""

from __future__ import annotations

from paddle_rbt_plugin.graph.graph import Graph
from paddle_rbt_plugin.graph.random_ops import draws


def constant_ops(graph: Graph) -> frozenset[int]:
    """Positions of the ops that compute constants."""
    constant: set[int] = set()
    for op in graph:
        producers = [graph.producer(t) for t in op.operands]
        if not draws(op.type, op.attrs) and all(p is not None and p.index in constant for p in producers):
            constant.add(op.index)
    return frozenset(constant)
