"""Layer norm (arXiv 1607.06450): two vectors of the hidden size, whole on every rank on purpose."""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl


class LayerNorm(Pattern):
    """A layer norm with its scale and shift."""

    name = "layer_norm"

    def build(self, g: Builder) -> None:
        scale, shift = g.param("scale", ndim=1), g.param("shift", ndim=1)
        g.op("layer_norm", g.tensor(), scale, shift)

    shard = {"scale": (None,), "shift": (None,)}


@hookimpl
def register_patterns(register):
    register(LayerNorm)
