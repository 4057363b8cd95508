"""Feed-forward network: act(x W1 + b1) W2 + b2.

Column parallel, then row parallel: each rank of ``mp`` holds a slice of the wide dimension, and the sum over ranks is one
all-reduce at the end; the second bias is added after it and stays whole.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern, TensorNode
from paddle_rbt_plugin.plugins import hookimpl

# tanh and sigmoid are left out: two Linears around them are a pooler and its classifier, not a feed-forward network.
ACTIVATIONS = {"gelu", "relu", "relu6", "leaky_relu", "elu", "silu", "swish", "mish", "hardswish"}


class FFN(Pattern):
    """Two projections with an activation between them."""

    name = "ffn"

    def build(self, g: Builder) -> None:
        wide = g.linear(g.tensor("x"), g.param("up_weight", ndim=2), g.param("up_bias", ndim=1))
        self.project_back(g, g.op(ACTIVATIONS, wide))

    @staticmethod
    def project_back(g: Builder, wide: TensorNode) -> TensorNode:
        wide = g.chain({"dropout", "cast"}, wide, at_most=2)
        return g.linear(wide, g.param("down_weight", ndim=2), g.param("down_bias", ndim=1))

    shard = {
        "x": ("dp", ..., None),
        "up_weight": (None, "mp"),
        "up_bias": ("mp",),
        "down_weight": ("mp", None),
        "down_bias": (None,),
    }

    dim_names = {
        "x": ("batch", ..., "hidden size"),
        "up_weight": ("hidden size", "feed-forward size"),
        "up_bias": ("feed-forward size",),
        "down_weight": ("feed-forward size", "hidden size"),
    }


@hookimpl
def register_patterns(register):
    register(FFN)
