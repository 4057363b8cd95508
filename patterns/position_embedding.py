"""Position embedding beside a word embedding: embedding(ids, W) + embedding(other, V).

The table is small and stays whole. A lone embedding is a word embedding and none of this pattern's business; in a sum of
two that are both untied either may be the one, and whole tables are right for both.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl


class PositionEmbedding(Pattern):
    """An embedding that is added to another one."""

    name = "position_embedding"

    def build(self, g: Builder) -> None:
        ids = g.data("ids", where=lambda t: t.ndim > 0 and t.shape[0] != 1)  # [1, sequence] holds no batch to shard
        out = g.op("embedding", ids, g.param("weight", ndim=2), name="out")
        other = g.op("embedding", g.tensor(), g.param(ndim=2))
        g.op("add", out, g.chain({"add", "cast", "scale", "dropout"}, other, at_most=3))

    shard = {
        "ids": ("dp", ...),
        "weight": (None, None),
        "out": ("dp", ..., None),
    }

    dim_names = {
        "ids": ("batch", ...),
        "weight": ("positions", "hidden size"),
        "out": ("batch", ..., "hidden size"),
    }


@hookimpl
def register_patterns(register):
    register(PositionEmbedding)
