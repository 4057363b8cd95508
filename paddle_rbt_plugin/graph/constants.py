"""Which ops of a graph compute constants: they depend on no parameter, no input and no random number.

Masks, rotary tables and position ids are mostly made by such ops. Whoever reads what they make can compute it.
"""

from __future__ import annotations

from paddle_rbt_plugin.graph.graph import Graph


def constant_ops(graph: Graph) -> frozenset[int]:
    """Positions of the ops that compute constants."""
    return graph.constant_ops
