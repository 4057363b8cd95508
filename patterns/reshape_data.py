"""An input that is reshaped, such as a loss mask that is made flat: reshape(data).

Data parallel along the first dimension; one of size 1 holds no batch.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl


class ReshapeData(Pattern):
    """An input that is reshaped."""

    name = "reshape_data"

    def build(self, g: Builder) -> None:
        g.op("reshape", g.data("data", where=lambda t: t.ndim > 0 and t.shape[0] != 1))

    shard = {"data": ("dp", ...)}

    dim_names = {"data": ("batch", ...)}


@hookimpl
def register_patterns(register):
    register(ReshapeData)
