"""Gated feed-forward network, SwiGLU or GeGLU (arXiv 2002.05202): (act(x Wg + bg) * (x Wu + bu)) Wd + bd.

Column parallel, then row parallel, as in a plain one: each rank of ``mp`` holds a slice of the wide dimension.
"""

from paddle_rbt_plugin.pattern import Builder
from paddle_rbt_plugin.plugins import hookimpl

from .ffn import FFN

ACTIVATIONS = {"silu", "swish", "gelu", "relu", "sigmoid"}


class GatedFFN(FFN):
    """Two projections side by side, one of which gates the other, and one back."""

    name = "gated_ffn"

    def build(self, g: Builder) -> None:
        x = g.tensor("x")
        gate, up = (g.linear(x, g.param(f"{n}_weight", ndim=2), g.param(f"{n}_bias", ndim=1)) for n in ("gate", "up"))
        if g.choose("composed", "fused") == "composed":
            wide = g.op("multiply", g.op(ACTIVATIONS, gate), up)
        else:
            wide = g.op("swiglu", gate, up)
        self.project_back(g, wide)

    shard = FFN.shard | {"gate_weight": (None, "mp"), "gate_bias": ("mp",)}

    dim_names = FFN.dim_names | {"gate_weight": ("hidden size", "feed-forward size")}


@hookimpl
def register_patterns(register):
    register(GatedFFN)
