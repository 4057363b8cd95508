"""Gated feed-forward network, SwiGLU or GeGLU (arXiv 2002.05202): (act(x Wg + bg) * (x Wu + bu)) Wd + bd.

Column parallel, then row parallel, as in a plain one: each rank of ``mp`` holds a slice of the wide dimension.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl

ACTIVATIONS = {"silu", "swish", "gelu", "relu", "sigmoid"}


class GatedFFN(Pattern):
    """Two projections side by side, one of which gates the other, and one back."""

    name = "gated_ffn"

    def build(self, g: Builder) -> None:
        x = g.tensor("x")
        gate, up = (g.linear(x, g.param(f"{n}_weight", ndim=2), g.param(f"{n}_bias", ndim=1)) for n in ("gate", "up"))
        if g.choose("composed", "fused") == "composed":
            wide = g.op("multiply", g.op(ACTIVATIONS, gate), up)
        else:
            wide = g.op("swiglu", gate, up)
        wide = g.chain({"dropout", "cast"}, wide, at_most=2)
        g.linear(wide, g.param("down_weight", ndim=2), g.param("down_bias", ndim=1))

    shard = {
        "x": ("dp", ..., None),
        "gate_weight": (None, "mp"),
        "gate_bias": ("mp",),
        "up_weight": (None, "mp"),
        "up_bias": ("mp",),
        "down_weight": ("mp", None),
        "down_bias": (None,),
    }

    dim_names = {
        "x": ("batch", ..., "hidden size"),
        "gate_weight": ("hidden size", "feed-forward size"),
        "up_weight": ("hidden size", "feed-forward size"),
        "down_weight": ("feed-forward size", "hidden size"),
    }


@hookimpl
def register_patterns(register):
    register(GatedFFN)
