"""An input that is cast, such as labels or a mask: cast(data).

Data parallel along the first dimension; one of size 1 holds no batch.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl


class CastData(Pattern):
    """An input that is cast."""

    name = "cast_data"

    def build(self, g: Builder) -> None:
        g.op("cast", g.data("data", where=lambda t: t.ndim > 1 and t.shape[0] != 1))

    shard = {"data": ("dp", ...)}

    dim_names = {"data": ("batch", ...)}


@hookimpl
def register_patterns(register):
    register(CastData)
