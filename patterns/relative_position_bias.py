"""Learned bias of the scores by distance, one number per head (T5, arXiv 1910.10683):
softmax(scores + transpose(embedding(distance, W))).

The heads are divided along ``mp`` as those of the projections are, so each rank looks up the biases of its own heads.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl


class RelativePositionBias(Pattern):
    """An embedding of distances that is added to the scores of attention."""

    name = "relative_position_bias"
    spans_layers = True  # the first layer makes the bias, all of them add it

    def build(self, g: Builder) -> None:
        bias = g.op("embedding", g.var(), g.param("weight", ndim=2))
        bias = g.chain({"unsqueeze", "cast", "add"}, g.op("transpose", bias), at_most=4)
        scores = g.op("add", g.chain({"scale", "cast"}, g.op("matmul"), at_most=2), bias)
        g.op("softmax", g.chain({"add", "cast"}, scores, at_most=3))

    shard = {"weight": (None, "mp")}

    dim_names = {"weight": ("distances", "attention heads")}


@hookimpl
def register_patterns(register):
    register(RelativePositionBias)
