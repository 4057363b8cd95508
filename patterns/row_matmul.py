"""Output projection of attention: merge_heads(softmax(...) v) W + b.

Row parallel: each rank of ``mp`` multiplies its heads, and the sum over ranks is one all-reduce; the bias is added after it
and stays whole. Any Linear after a reshape would look alike (patches of an image, a classifier after a flatten, an MoE
router) and would gain nothing from this sharding, so the reshape must merge the heads of an attention core.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl

FUSED_CORES = {"flash_attn", "flash_attention", "scaled_dot_product_attention", "memory_efficient_attention"}


class RowMatmul(Pattern):
    """The projection that follows attention."""

    name = "row_matmul"

    def build(self, g: Builder) -> None:
        if g.choose("composed", "fused") == "composed":
            weights = g.chain({"dropout", "cast"}, g.op("softmax", g.tensor()), at_most=2)
            context = g.op("matmul", weights, g.tensor())
        else:
            context = g.op(FUSED_CORES, g.tensor())
        merged = g.op("reshape", g.chain({"transpose", "cast"}, context, at_most=2))
        g.linear(merged, g.param("weight", ndim=2), g.param("bias", ndim=1))

    shard = {
        "weight": ("mp", None),
        "bias": (None,),
    }


@hookimpl
def register_patterns(register):
    register(RowMatmul)
