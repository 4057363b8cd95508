"""Experts of a mixture with stacked weights whose gate and up projection are one: (act(gate part) * up part of x W1) W2, with
W1 [experts, hidden, 2 wide].

Experts are divided along ``ep``, and each along ``mp`` as ``fused_gated_ffn`` is: where the gate's columns come first, Paddle
gathers the result of the projection before it is cut. Biases are [experts, 2 wide] and [experts, hidden].
"""

from paddle_rbt_plugin.pattern import Builder, Pattern, TensorNode
from paddle_rbt_plugin.plugins import hookimpl

from .fused_gated_ffn import ACTIVATIONS, PARTING
from .moe_ffn import LIMITS


class FusedMoEFFN(Pattern):
    """All experts of one layer."""

    name = "fused_moe_ffn"

    def build(self, g: Builder) -> None:
        biased = g.choose(False, True)
        both = self.project(g, g.tensor("x"), "gate_up", biased)
        form = g.choose("activation", "written out", "fused")
        if form == "fused":
            wide = g.op("swiglu", g.chain(PARTING, both, at_most=1))
        else:
            gate, up = (g.chain(PARTING | LIMITS, both, at_most=3) for _ in range(2))
            up = g.chain({"scale", "add"}, up, at_most=1)
            if form == "written out":
                gated = g.op("multiply", gate, g.op("sigmoid", g.chain({"scale"}, gate, at_most=1)))
            else:
                gated = g.op(ACTIVATIONS, gate)
            wide = g.op("multiply", gated, up)
        self.project(g, g.chain({"dropout", "cast", "reshape"}, wide, at_most=2), "down", biased)

    @staticmethod
    def project(g: Builder, x: TensorNode, name: str, biased: bool) -> TensorNode:
        weight = g.cast(g.param(f"{name}_weight", ndim=3))
        product = g.op({"matmul", "bmm"}, g.cast(x), weight, attrs=lambda a: not a.get("transpose_y"))
        if not biased:
            return product
        bias = g.chain({"reshape", "unsqueeze", "cast"}, g.param(f"{name}_bias", ndim=2), at_most=2)
        return g.op("add", g.chain({"reshape", "cast"}, product, at_most=2), bias)

    shard = {
        "gate_up_weight": ("ep", None, "mp"),
        "gate_up_bias": ("ep", "mp"),
        "down_weight": ("ep", "mp", None),
        "down_bias": ("ep", None),
    }

    dim_names = {
        "gate_up_weight": ("experts", "hidden size", "twice the feed-forward size"),
        "down_weight": ("experts", "feed-forward size", "hidden size"),
    }


@hookimpl
def register_patterns(register):
    register(FusedMoEFFN)
