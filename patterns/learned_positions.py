"""Learned positions without a look-up, as vision transformers have them: x + P, with P [1, sequence, hidden].

The table is small and stays whole.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl


class LearnedPositions(Pattern):
    """A parameter that is added to a whole batch."""

    name = "learned_positions"

    def build(self, g: Builder) -> None:
        positions = g.param("positions", ndim=3, where=lambda t: t.shape[0] == 1)
        g.op("add", g.tensor(), g.cast(positions))

    shard = {"positions": (None, None, None)}

    dim_names = {"positions": (None, "positions", "hidden size")}


@hookimpl
def register_patterns(register):
    register(LearnedPositions)
