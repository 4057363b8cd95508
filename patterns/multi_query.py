"""Projections of multi-query attention (arXiv 1911.02150): many heads of queries share one of keys and values.

The queries are column parallel. One head cannot be split, so every rank of ``mp`` computes the keys and values whole,
takes what its queries need, and gathers the gradients of that.
"""

from paddle_rbt_plugin.pattern import BIASES, Builder, Pattern, attention_core, projected_heads
from paddle_rbt_plugin.plugins import hookimpl


class MultiQuery(Pattern):
    """The projections of a self-attention with a single head of keys and values."""

    name = "multi_query"

    def build(self, g: Builder) -> None:
        x, biased = g.tensor("x"), g.choose(*BIASES)
        q = projected_heads(g, x, "q", bias="q" in biased)
        attention_core(g, q, *(projected_heads(g, x, name, bias=name in biased, heads=1) for name in "kv"))

    shard = {
        "x": ("dp", ..., None),
        "q_weight": (None, "mp"),
        "k_weight": (None, None),
        "v_weight": (None, None),
        "q_bias": ("mp",),
        "k_bias": (None,),
        "v_bias": (None,),
        "q_heads": ("dp", None, "mp", None),
    }

    dim_names = {
        "x": ("batch", ..., "hidden size"),
        "q_heads": ("batch", "sequence", "attention heads", "head size"),
    }


@hookimpl
def register_patterns(register):
    register(MultiQuery)
