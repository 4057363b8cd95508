"""Projections of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of all heads come from one
narrow vector per token, and perhaps queries from another.

The projections to heads are column parallel: each rank of ``mp`` holds whole heads. The projections to narrow vectors, which
all heads read, stay whole. All heads also share one rotary key, which every rank computes; it takes what its heads need, and
gathers the gradients of that.
"""

from paddle_rbt_plugin.pattern import HEAD_OPS, Builder, Pattern, TensorNode, attention_core, projected_heads
from paddle_rbt_plugin.plugins import hookimpl


class LatentAttention(Pattern):
    """The projections of one self-attention, up to the place where they meet."""

    name = "latent_attention"

    def build(self, g: Builder) -> None:
        x, biased = g.tensor("x"), g.choose(False, True)
        narrow = self.narrow(g, x, "q", biased) if g.choose("narrow", "wide") == "narrow" else x
        queries = projected_heads(g, narrow, "q", bias=False)
        latent = g.linear(self.narrow(g, x, "kv", biased), g.param("kv_weight", ndim=2))
        both = g.op("reshape", latent, name="kv_heads", ndim=4, where=lambda t: t.shape[2] > 1)
        attention_core(g, queries, *(g.chain(HEAD_OPS, both, at_most=8) for _ in "kv"))

    @staticmethod
    def narrow(g: Builder, x: TensorNode, name: str, biased: bool) -> TensorNode:
        """The narrow vector: a projection, a part of it taken, and normed."""
        narrow = g.linear(x, g.param(f"{name}_narrow_weight", ndim=2))
        if biased:
            narrow = g.cast(g.op("add", narrow, g.cast(g.param(f"{name}_narrow_bias", ndim=1))))
        return g.chain(HEAD_OPS, narrow, at_most=8)

    shard = {
        "x": ("dp", ..., None),
        "q_narrow_weight": (None, None),
        "q_narrow_bias": (None,),
        "kv_narrow_weight": (None, None),
        "kv_narrow_bias": (None,),
        "q_weight": (None, "mp"),
        "kv_weight": (None, "mp"),
        "q_heads": ("dp", None, "mp", None),
        "kv_heads": ("dp", None, "mp", None),
    }

    dim_names = {
        "x": ("batch", ..., "hidden size"),
        "q_heads": ("batch", "sequence", "attention heads", "head size"),
        "kv_heads": ("batch", "sequence", "attention heads", "keys and values"),
    }


@hookimpl
def register_patterns(register):
    register(LatentAttention)
