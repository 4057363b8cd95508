"""Projections of cross attention: queries of one tensor, keys and values of another,
softmax(heads(x Wq + bq) heads(m Wk + bk)^T ...) heads(m Wv + bv).

Column parallel, as in self-attention: each rank of ``mp`` holds whole heads.
"""

from paddle_rbt_plugin.pattern import BIASES, Builder, Pattern, attention_core, projected_heads
from paddle_rbt_plugin.plugins import hookimpl


class CrossAttention(Pattern):
    """The projections of an attention whose keys and values come from elsewhere."""

    name = "cross_attention"

    def build(self, g: Builder) -> None:
        sources, biased = {"q": g.tensor("x")} | dict.fromkeys("kv", g.tensor("memory")), g.choose(*BIASES)
        attention_core(g, *(projected_heads(g, x, name, bias=name in biased) for name, x in sources.items()))

    shard = {
        "x": ("dp", ..., None),
        "memory": ("dp", ..., None),
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
        "memory": ("batch", ..., "hidden size"),
        "q_heads": ("batch", "sequence", "attention heads", "head size"),
        "k_heads": ("batch", "sequence", "key and value heads", "head size"),
        "v_heads": ("batch", "sequence", "key and value heads", "head size"),
    }


@hookimpl
def register_patterns(register):
    register(CrossAttention)
