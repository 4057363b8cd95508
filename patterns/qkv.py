"""Projections of self-attention, up to the place where they meet:
softmax(heads(x Wq + bq) heads(x Wk + bk)^T ...) heads(x Wv + bv).

Column parallel: each rank of ``mp`` holds whole heads. Where queries share keys and values there are fewer of these, and
they decide which degrees are legal. A single head of keys and values is the business of ``multi_query``.
"""

from paddle_rbt_plugin.pattern import BIASES, Builder, Pattern, attention_core, projected_heads
from paddle_rbt_plugin.plugins import hookimpl


class QKV(Pattern):
    """The query, key and value projections of one self-attention."""

    name = "qkv"

    def build(self, g: Builder) -> None:
        x, biased = g.tensor("x"), g.choose(*BIASES)
        attention_core(g, *(projected_heads(g, x, name, bias=name in biased) for name in "qkv"))

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


@hookimpl
def register_patterns(register):
    register(QKV)
