"""RMS norm (arXiv 1910.07467), written out or fused: x rsqrt(mean(x^2) + eps) w.

One vector of the hidden size (or of the head size, where heads are normalised), whole on every rank on purpose.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl


class RMSNorm(Pattern):
    """An RMS norm with its scale."""

    name = "rms_norm"

    def build(self, g: Builder) -> None:
        scale = g.param("scale", ndim=1)
        if g.choose("composed", "fused") == "fused":
            g.op({"rms_norm", "fused_rms_norm_ext", "fused_rms_norm"}, g.tensor(), scale)
            return
        normal = g.op("multiply", g.tensor(), g.op("rsqrt", g.tensor()))
        g.op("multiply", g.cast(normal), g.chain({"cast", "scale"}, scale, at_most=2))  # Gemma multiplies by 1 + w

    shard = {"scale": (None,)}


@hookimpl
def register_patterns(register):
    register(RMSNorm)
