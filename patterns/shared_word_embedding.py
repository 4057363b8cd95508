"""Word embedding whose weight is the head's too: embedding(ids, W) ... x W^T.

Vocabulary parallel: each rank of ``mp`` holds a slice of the vocabulary.
"""

from paddle_rbt_plugin.pattern import Builder, Pattern
from paddle_rbt_plugin.plugins import hookimpl


class SharedWordEmbedding(Pattern):
    """A word embedding tied to the head."""

    name = "shared_word_embedding"
    spans_layers = True  # the first layer holds the embedding, the last one the head

    def build(self, g: Builder) -> None:
        ids, weight, x = g.data("ids"), g.param("weight", ndim=2), g.tensor("x")
        g.op("embedding", g.chain({"cast", "slice"}, ids, at_most=2), g.cast(weight), name="out")
        if g.choose("attribute", "op") == "attribute":
            logits = g.op("matmul", g.cast(x), g.cast(weight), attrs={"transpose_y": True})
        else:
            logits = g.op("matmul", g.cast(x), g.op("transpose", g.cast(weight)), attrs=lambda a: not a.get("transpose_y"))
        if g.choose("bias", "no bias") == "bias":
            g.op("add", g.cast(logits), g.cast(g.param("bias", ndim=1)))

    shard = {
        "ids": ("dp", ...),
        "weight": ("mp", None),
        "out": ("dp", ..., None),
        "x": ("dp", ..., None),
        "bias": ("mp",),
    }

    dim_names = {
        "ids": ("batch", ...),
        "weight": ("vocabulary", "hidden size"),
        "bias": ("vocabulary",),
        "x": ("batch", ..., "hidden size"),
    }


@hookimpl
def register_patterns(register):
    register(SharedWordEmbedding)
