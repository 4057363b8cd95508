"""Output projection of attention: merge_heads(softmax(...) v) W + b.

Row parallel: each rank of ``mp`` multiplies its heads, and the sum over ranks is one all-reduce; the bias is added after it
and stays whole. Any Linear after a reshape would look alike (patches of an image, a classifier after a flatten, an MoE
router) and would gain nothing from this sharding, so the reshape must merge the heads of an attention core.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern, attention_core
from paddle_rbt_plugin.plugins import hookimpl


class RowMatmul(Pattern):
    """The projection that follows attention."""

    name = "row_matmul"

    def build(self, g: Builder) -> None:
        context = attention_core(g, g.tensor(), g.tensor(), g.tensor())
        merged = g.op({"reshape", "flatten"}, g.chain({"transpose", "cast"}, context, at_most=2))
        merged = g.chain({"reshape"}, merged, at_most=1)  # some models shape it anew to be sure
        g.linear(merged, g.param("weight", ndim=2), g.param("bias", ndim=1))

    shard = {
        "weight": ("mp", None),
        "bias": (None,),
    }


@hookimpl
def register_patterns(register):
    register(RowMatmul)
