"""Projections of self-attention, up to the place where they meet:
softmax(heads(x Wq + bq) heads(x Wk + bk)^T ...) heads(x Wv + bv).

Column parallel: each rank of ``mp`` holds whole heads. Query, key and value must meet in one attention core, so that the
projections of two blocks, or of a cross attention, are never taken for one.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern, TensorNode
from paddle_rbt_plugin.plugins import hookimpl

# What may happen to heads between projection and core: layout, rotary embedding, norm, repetition for grouped queries.
HEAD_OPS = {
    "reshape", "transpose", "unsqueeze", "squeeze", "expand", "expand_as", "tile", "repeat_interleave", "slice",
    "strided_slice", "split", "concat", "stack", "cast", "scale", "multiply", "divide", "add", "subtract",
    "layer_norm", "rms_norm", "fused_rotary_position_embedding",
}  # fmt: skip
# What may happen to the scores before the softmax: scaling, masks.
SCORE_OPS = {"scale", "multiply", "divide", "add", "subtract", "where", "masked_fill", "cast", "reshape", "tanh"}
FUSED_CORES = {"flash_attn", "flash_attention", "scaled_dot_product_attention", "memory_efficient_attention"}


class QKV(Pattern):
    """The query, key and value projections of one self-attention."""

    name = "qkv"

    def build(self, g: Builder) -> None:
        x = g.tensor("x")
        q, k, v = (_heads(g, x, name) for name in ("q", "k", "v"))
        if g.choose("composed", "fused") == "composed":
            scores = g.op("matmul", q, k)
            weights = g.op("softmax", g.chain(SCORE_OPS, scores, at_most=6))
            g.op("matmul", g.chain({"dropout", "cast"}, weights, at_most=2), v)
        else:
            g.op(FUSED_CORES, q, k, v)

    shard = {
        "x": ("dp", ..., None),
        "q_weight": (None, "mp"),
        "k_weight": (None, "mp"),
        "v_weight": (None, "mp"),
        "q_bias": ("mp",),
        "k_bias": ("mp",),
        "v_bias": ("mp",),
        "q_heads": ("dp", None, "mp", None),
        "k_heads": ("dp", None, "mp", None),
        "v_heads": ("dp", None, "mp", None),
    }

    dim_names = {
        "x": ("batch", ..., "hidden size"),
        "q_heads": ("batch", "sequence", "attention heads", "head size"),
        "k_heads": ("batch", "sequence", "key and value heads", "head size"),
        "v_heads": ("batch", "sequence", "key and value heads", "head size"),
    }


def _heads(g: Builder, x: TensorNode, name: str) -> TensorNode:
    """A projection as [batch, sequence, heads, head size], and on to the core."""
    projected = g.linear(x, g.param(f"{name}_weight", ndim=2), g.param(f"{name}_bias", ndim=1))
    return g.chain(HEAD_OPS, g.op("reshape", projected, name=f"{name}_heads", ndim=4), at_most=10)


@hookimpl
def register_patterns(register):
    register(QKV)
