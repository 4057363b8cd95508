"""Position embedding of positions that the program counts itself: embedding(arange(sequence), W).

The table is small and stays whole, and the positions hold no batch to divide.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl

RESHAPING = {"unsqueeze", "expand", "expand_as", "tile", "reshape", "cast", "slice", "add", "scale"}


class CountedPositions(Pattern):
    """An embedding of counted positions."""

    name = "counted_positions"

    def build(self, g: Builder) -> None:
        ids = g.chain(RESHAPING, g.op("arange"), at_most=4)
        g.op("embedding", ids, g.param("weight", ndim=2))

    shard = {"weight": (None, None)}

    dim_names = {"weight": ("positions", "hidden size")}


@hookimpl
def register_patterns(register):
    register(CountedPositions)
