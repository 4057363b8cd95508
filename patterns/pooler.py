"""Sentence vector of BERT: tanh(x[:, 0] W + b).

Once per sequence, not once per token, so there is nothing to gain: whole on every rank.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl


class Pooler(Pattern):
    """The projection of the first token."""

    name = "pooler"

    def build(self, g: Builder) -> None:
        first = g.op({"slice", "strided_slice"}, g.tensor())
        pooled = g.linear(first, g.param("weight", ndim=2), g.param("bias", ndim=1))
        g.op("tanh", pooled)

    shard = {"weight": (None, None), "bias": (None,)}


@hookimpl
def register_patterns(register):
    register(Pooler)
