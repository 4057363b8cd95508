"""Attention as patterns draw it: heads flow through layout and rotary ops to a core, written out or fused.

Patterns of projections meet in the core, so that the projections of two blocks are never taken for one. Everything here is
made of the builder's own methods.
"""

from __future__ import annotations

from paddle_rbt_plugin.pattern.builder import Builder, TensorNode

HEAD_OPS = frozenset(
    {"reshape", "flatten", "transpose", "unsqueeze", "squeeze", "expand", "expand_as", "tile", "repeat_interleave", "slice",
     "strided_slice", "split", "split_with_num", "unbind", "concat", "stack", "cast", "scale", "multiply", "divide", "add",
     "subtract", "layer_norm", "rms_norm", "square", "mean", "rsqrt", "fused_rotary_position_embedding", "assign"}
)  # fmt: skip
"""What may happen to heads between projection and core: layout, rotary embedding, norm, repetition for grouped queries."""

SCORE_OPS = frozenset(
    {
        "scale",
        "multiply",
        "divide",
        "add",
        "subtract",
        "where",
        "masked_fill",
        "cast",
        "reshape",
        "tanh",
        "maximum",
        "clip",
        "concat",
    }
)
"""What may happen to the scores before the softmax: scaling, capping, masks, position biases, a sink beside them (which is cut
off the weights again)."""

FUSED_CORES = frozenset(
    {"flash_attn", "flash_attention", "flashmask_attention", "scaled_dot_product_attention", "memory_efficient_attention"}
)
"""Ops that are a whole attention core; their first operands are query, key and value."""


BIASES = ("qkv", "", "qv")
"""Which projections of an attention have a bias: all, none, or all but the keys, whose bias the softmax would cancel."""


def projected_heads(
    g: Builder, x: TensorNode, name: str, *, bias: bool | None = None, heads: int | None = None, at_most: int = 12
) -> TensorNode:
    """A projection ``{name}_weight`` of ``x``, plus ``{name}_bias``, as ``{name}_heads`` [batch, sequence, heads, head size],
    and on to where the core reads it. ``bias=None`` leaves open whether there is a bias, which doubles the variants.
    ``heads=1`` takes a single head only, ``heads=None`` takes several only."""
    weight = g.param(f"{name}_weight", ndim=2)
    if bias is None:
        bias = g.choose(True, False)
    projected = g.linear(x, weight)
    if bias:
        projected = g.cast(g.op("add", projected, g.cast(g.param(f"{name}_bias", ndim=1))))
    fits = (lambda t: t.shape[2] == 1) if heads == 1 else (lambda t: t.shape[2] > 1)
    return g.chain(HEAD_OPS, g.op("reshape", projected, name=f"{name}_heads", ndim=4, where=fits), at_most=at_most)


def attention_core(g: Builder, q: TensorNode, k: TensorNode, v: TensorNode) -> TensorNode:
    """What attention makes of heads: softmax(q k^T ...) v, or a fused op. Draws two variants."""
    if g.choose("composed", "fused") == "fused":
        return g.op(FUSED_CORES, q, k, v)
    weights = g.op("softmax", g.chain(SCORE_OPS, g.op("matmul", q, k), at_most=6))
    return g.op("matmul", g.chain({"dropout", "cast", "slice"}, weights, at_most=3), v)
