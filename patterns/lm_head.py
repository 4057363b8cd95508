"""Head with a weight of its own: cross_entropy(x W + b), one prediction per token.

Column parallel: each rank of ``mp`` computes its slice of the vocabulary.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl

LOGIT_OPS = {"cast", "reshape", "scale", "slice", "strided_slice", "transpose", "flatten", "tanh"}


class LMHead(Pattern):
    """The projection to the vocabulary, before the loss."""

    name = "lm_head"

    def build(self, g: Builder) -> None:
        x = g.tensor("x", ndim=3)
        logits = g.linear(x, g.param("weight", ndim=2), g.param("bias", ndim=1))
        g.op("cross_entropy_with_softmax", g.chain(LOGIT_OPS, logits, at_most=6))

    shard = {
        "x": ("dp", None, None),
        "weight": (None, "mp"),
        "bias": ("mp",),
    }

    dim_names = {
        "x": ("batch", "sequence", "hidden size"),
        "weight": ("hidden size", "vocabulary"),
        "bias": ("vocabulary",),
    }


@hookimpl
def register_patterns(register):
    register(LMHead)
