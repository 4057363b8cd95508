"""Patches of an image by convolution: conv2d(image, W) + b, the stride as large as the kernel.

A small share of a vision transformer's work and weights, whole on every rank; the images are divided along ``dp``.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl


class PatchEmbedding(Pattern):
    """A convolution that cuts an image into patches."""

    name = "patch_embedding"

    def build(self, g: Builder) -> None:
        image = g.data("image", ndim=4)
        patches = g.op({"conv2d", "conv2d_bias"}, g.cast(image), g.cast(g.param("weight", ndim=4)))
        if g.choose("bias", "no bias") == "bias":
            g.op("add", g.cast(patches), g.chain({"reshape", "cast"}, g.param("bias", ndim=1), at_most=2))

    shard = {
        "image": ("dp", None, None, None),
        "weight": (None, None, None, None),
        "bias": (None,),
    }

    dim_names = {"image": ("batch", "channels", "height", "width")}


@hookimpl
def register_patterns(register):
    register(PatchEmbedding)
