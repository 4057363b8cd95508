"""Router of a mixture of experts: topk(softmax(x W)), of all experts or by groups of them.

Its few columns, one per expert, stay whole, so that every rank chooses the same experts.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl


class MoERouter(Pattern):
    """The projection that chooses experts."""

    name = "moe_router"

    def build(self, g: Builder) -> None:
        weight = g.param("weight", ndim=2)
        if g.choose("as used", "transposed") == "transposed":
            weight = g.op("transpose", g.cast(weight))
        scores = g.linear(g.tensor(), weight, g.param("bias", ndim=1))
        scores = g.chain({"softmax", "sigmoid", "cast", "add", "reshape"}, scores, at_most=6)
        g.op({"topk", "argmax", "max"}, scores)

    shard = {"weight": (None, None), "bias": (None,)}


@hookimpl
def register_patterns(register):
    register(MoERouter)
