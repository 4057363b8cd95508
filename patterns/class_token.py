"""Token that stands for the whole image or sentence: concat(expand(T), x), with T [1, 1, hidden].

A single vector, whole on every rank.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl


class ClassToken(Pattern):
    """A parameter put in front of a sequence."""

    name = "class_token"

    def build(self, g: Builder) -> None:
        token = g.param("token", ndim=3, where=lambda t: t.shape[:2] == (1, 1))
        g.op("concat", g.chain({"expand", "tile", "add", "cast"}, token, at_most=3))

    shard = {"token": (None, None, None)}


@hookimpl
def register_patterns(register):
    register(ClassToken)
