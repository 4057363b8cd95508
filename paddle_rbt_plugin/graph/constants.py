"""Which ops of a graph compute constants: they depend on no parameter, no input and no random number.

Masks, rotary tables and position ids are mostly made by such ops. Whoever reads what they make can compute it.
"""

from __future__ import annotations

from paddle_rbt_plugin.graph.graph import Graph

RANDOM_OPS = frozenset(
    {
        "bernoulli",
        "binomial",
        "class_center_sample",
        "dirichlet",
        "dropout",
        "exponential",
        "flash_attn",
        "flash_attn_qkvpacked",
    }
    | {"flash_attn_unpadded", "flash_attn_varlen_qkvpacked", "flashmask_attention", "fractional_max_pool2d"}
    | {"fractional_max_pool3d", "fused_attention", "fused_bias_dropout_residual_layer_norm", "fused_dropout_add"}
    | {"fused_feedforward", "gaussian", "gumbel_softmax", "memory_efficient_attention", "multinomial", "poisson", "randint"}
    | {"randperm", "rrelu", "standard_gamma", "truncated_gaussian_random", "uniform"}
)
"""Ops that draw random numbers."""


def constant_ops(graph: Graph) -> frozenset[int]:
    """Positions of the ops that compute constants."""
    constant: set[int] = set()
    for op in graph:
        producers = [graph.producer(t) for t in op.operands]
        # The canonical name of an op that works in place, like uniform_, has no underscore.
        if op.type not in RANDOM_OPS and all(p is not None and p.index in constant for p in producers):
            constant.add(op.index)
    return frozenset(constant)
