"""Head with one prediction per sequence: cross_entropy(x W + b), with x [batch, hidden].

A few classes, whole on every rank; their number need not be divisible by anything.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl


class Classifier(Pattern):
    """The projection to the classes, before the loss."""

    name = "classifier"

    def build(self, g: Builder) -> None:
        x = g.tensor("x", ndim=2)
        logits = g.linear(x, g.param("weight", ndim=2), g.param("bias", ndim=1))
        g.op("cross_entropy_with_softmax", g.chain({"cast", "scale"}, logits, at_most=2))

    shard = {
        "x": ("dp", None),
        "weight": (None, None),
        "bias": (None,),
    }

    dim_names = {"x": ("batch", "hidden size"), "weight": ("hidden size", "classes")}


@hookimpl
def register_patterns(register):
    register(Classifier)
