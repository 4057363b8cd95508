"""Projections of cross attention: queries of one tensor, keys and values of another,
softmax(heads(x Wq + bq) heads(m Wk + bk)^T ...) heads(m Wv + bv).

Column parallel, as in self-attention: each rank of ``mp`` holds whole heads.
"""

from paddle_rbt_plugin.pattern import BIASES, Builder, attention_core, projected_heads
from paddle_rbt_plugin.plugins import hookimpl

from .qkv import QKV


class CrossAttention(QKV):
    """The projections of an attention whose keys and values come from elsewhere."""

    name = "cross_attention"

    def build(self, g: Builder) -> None:
        sources, biased = {"q": g.tensor("x")} | dict.fromkeys("kv", g.tensor("memory")), g.choose(*BIASES)
        attention_core(g, *(projected_heads(g, x, name, bias=name in biased) for name, x in sources.items()))

    shard = QKV.shard | {"memory": ("dp", ..., None)}

    dim_names = QKV.dim_names | {"memory": ("batch", ..., "hidden size")}


@hookimpl
def register_patterns(register):
    register(CrossAttention)
