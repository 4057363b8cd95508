"""Labels as they come: cross_entropy(logits, data).

Data parallel along the first dimension.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl


class LabelData(Pattern):
    """An input that a cross entropy reads."""

    name = "label_data"

    def build(self, g: Builder) -> None:
        g.op("cross_entropy_with_softmax", g.tensor(), g.data("data", where=lambda t: t.ndim > 0 and t.shape[0] != 1))

    shard = {"data": ("dp", ...)}

    dim_names = {"data": ("batch", ...)}


@hookimpl
def register_patterns(register):
    register(LabelData)
