"""Projection before BERT's word head: layer_norm(act(x W + b)) E^T.

The norm needs the whole hidden dimension right behind it, so dividing this one square weight would gather its result at once:
whole on every rank.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl


class HeadTransform(Pattern):
    """A projection, an activation and a norm before a tied head."""

    name = "head_transform"
    spans_layers = True

    def build(self, g: Builder) -> None:
        h = g.linear(g.tensor(), g.param("weight", ndim=2), g.param("bias", ndim=1))
        h = g.op("layer_norm", g.op({"gelu", "relu", "silu", "tanh"}, h))
        g.op("matmul", g.cast(h), g.cast(g.param(ndim=2)), attrs={"transpose_y": True})

    shard = {"weight": (None, None), "bias": (None,)}


@hookimpl
def register_patterns(register):
    register(HeadTransform)
