"""Mask that the program is given: softmax(scores + data), or a mask made of the data on the way.

Data parallel along the first dimension; a mask for all sequences has size 1 there, or no batch dimension at all.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl


class AttentionMask(Pattern):
    """An input that is added to the scores of attention."""

    name = "attention_mask"
    spans_layers = True  # all layers add the same mask

    def build(self, g: Builder) -> None:
        mask = g.data("mask", where=lambda t: t.ndim == 4 and t.shape[0] != 1)
        mask = g.chain({"cast", "scale", "unsqueeze"}, mask, at_most=3)
        scores = g.op("add", g.chain({"scale", "cast"}, g.op("matmul"), at_most=2), mask)
        g.op("softmax", g.cast(scores))

    shard = {"mask": ("dp", None, None, None)}

    dim_names = {"mask": ("batch", "heads", "sequence", "sequence")}


@hookimpl
def register_patterns(register):
    register(AttentionMask)
