"""Experts of a mixture with stacked weights: act(x W1) W2, gated or not, with W1 [experts, hidden, wide].

Experts are divided along ``ep``; each is a feed-forward network of its own, column and then row parallel along ``mp``. Biases
are [experts, 1, wide] and [experts, 1, hidden]. Gates may be limited, as in GPT-OSS.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern, TensorNode
from paddle_rbt_plugin.plugins import hookimpl

ACTIVATIONS = {"silu", "swish", "gelu", "relu"}
LIMITS = {"clip", "cast"}


class MoEFFN(Pattern):
    """All experts of one layer."""

    name = "moe_ffn"

    def build(self, g: Builder) -> None:
        x = g.tensor("x")
        biased = g.choose(False, True)
        up = g.chain(LIMITS, self.project(g, x, "up", biased), at_most=2)
        if g.choose("activation", "written out") == "activation":
            wide = g.op(ACTIVATIONS, up)
        else:
            wide = g.op("multiply", up, g.op("sigmoid", g.chain({"scale", "cast"}, up, at_most=2)))
        if g.choose("gated", "plain") == "gated":
            value = self.project(g, x, "value", biased)
            wide = g.op("multiply", wide, g.chain(LIMITS | {"scale", "add"}, value, at_most=4))
        self.project(g, g.chain({"dropout", "cast"}, wide, at_most=2), "down", biased)

    @staticmethod
    def project(g: Builder, x: TensorNode, name: str, biased: bool) -> TensorNode:
        weight = g.cast(g.param(f"{name}_weight", ndim=3))
        product = g.op({"matmul", "bmm"}, g.cast(x), weight, attrs=lambda a: not a.get("transpose_y"))
        return g.op("add", g.cast(product), g.cast(g.param(f"{name}_bias", ndim=3))) if biased else product

    shard = {
        "up_weight": ("ep", None, "mp"),
        "up_bias": ("ep", None, "mp"),
        "value_weight": ("ep", None, "mp"),
        "value_bias": ("ep", None, "mp"),
        "down_weight": ("ep", "mp", None),
        "down_bias": ("ep", None, None),
    }

    dim_names = {
        "up_weight": ("experts", "hidden size", "feed-forward size"),
        "value_weight": ("experts", "hidden size", "feed-forward size"),
        "down_weight": ("experts", "feed-forward size", "hidden size"),
    }


@hookimpl
def register_patterns(register):
    register(MoEFFN)
