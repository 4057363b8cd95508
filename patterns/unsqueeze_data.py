"""An input that gains a dimension behind its first, such as labels before a cross entropy: unsqueeze(data).

Data parallel along the first dimension. Where the new dimension comes first (a mask of [sequence, sequence]), or the first
one has size 1, the input holds no batch.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl


class UnsqueezeData(Pattern):
    """An input that is unsqueezed."""

    name = "unsqueeze_data"

    def build(self, g: Builder) -> None:
        g.op("unsqueeze", g.data("data", where=lambda t: t.ndim > 0), where=lambda t: t.shape[0] != 1)

    shard = {"data": ("dp", ...)}

    dim_names = {"data": ("batch", ...)}


@hookimpl
def register_patterns(register):
    register(UnsqueezeData)
