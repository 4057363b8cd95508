"""Experts of a mixture with stacked weights: act(x W1) W2, gated or not, with W1 [experts, hidden, wide].

Experts are divided along ``ep``; each is a feed-forward network of its own, column and then row parallel along ``mp``.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern, TensorNode
from paddle_rbt_plugin.plugins import hookimpl

ACTIVATIONS = {"silu", "swish", "gelu", "relu"}


class MoEFFN(Pattern):
    """All experts of one layer."""

    name = "moe_ffn"

    def build(self, g: Builder) -> None:
        x = g.tensor("x")
        wide = g.op(ACTIVATIONS, self.project(g, x, "up_weight"))
        if g.choose("gated", "plain") == "gated":
            wide = g.op("multiply", wide, self.project(g, x, "value_weight"))
        self.project(g, g.chain({"dropout", "cast"}, wide, at_most=2), "down_weight")

    @staticmethod
    def project(g: Builder, x: TensorNode, weight: str) -> TensorNode:
        return g.op({"matmul", "bmm"}, g.cast(x), g.cast(g.param(weight, ndim=3)), attrs=lambda a: not a.get("transpose_y"))

    shard = {
        "up_weight": ("ep", None, "mp"),
        "value_weight": ("ep", None, "mp"),
        "down_weight": ("ep", "mp", None),
    }

    dim_names = {
        "up_weight": ("experts", "hidden size", "feed-forward size"),
        "value_weight": ("experts", "hidden size", "feed-forward size"),
        "down_weight": ("experts", "feed-forward size", "hidden size"),
    }


@hookimpl
def register_patterns(register):
    register(MoEFFN)
