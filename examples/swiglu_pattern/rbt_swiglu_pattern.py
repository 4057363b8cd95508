"""Gated feed-forward network of LLaMA: (silu(x Wg) * (x Wu)) Wd.

Column parallel, then row parallel: each rank of ``mp`` holds a slice of the wide dimension.
"""

from paddle_rbt_plugin.pattern import Pattern
from paddle_rbt_plugin.plugins import hookimpl


class SwiGLUFFN(Pattern):
    """Gated feed-forward network of LLaMA."""

    name = "swiglu_ffn"

    def build(self, g):
        x = g.tensor("x")
        gate, up, down = (g.param(n, ndim=2) for n in ("gate_weight", "up_weight", "down_weight"))
        h = g.op("multiply", g.op("silu", g.op("matmul", x, gate)), g.op("matmul", x, up))
        g.op("matmul", h, down)

    shard = {
        "x": ("dp", ..., None),
        "gate_weight": (None, "mp"),
        "up_weight": (None, "mp"),
        "down_weight": ("mp", None),
    }


@hookimpl
def register_patterns(register):
    register(SwiGLUFFN)
