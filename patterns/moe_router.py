"""Router of a mixture of experts: topk(softmax(x W)).

Its few columns, one per expert, stay whole, so that every rank chooses the same experts.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl


class MoERouter(Pattern):
    """The projection that chooses experts."""

    name = "moe_router"

    def build(self, g: Builder) -> None:
        scores = g.linear(g.tensor(), g.param("weight", ndim=2), g.param("bias", ndim=1))
        scores = g.chain({"softmax", "sigmoid", "cast", "add"}, scores, at_most=3)
        g.op("topk", scores)

    shard = {"weight": (None, None), "bias": (None,)}


@hookimpl
def register_patterns(register):
    register(MoERouter)
