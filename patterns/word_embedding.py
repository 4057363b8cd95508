"""Word embedding whose weight nothing else reads: embedding(ids, W).

Vocabulary parallel: each rank of ``mp`` looks up the words of its slice, and the sum over ranks is one all-reduce.
In a sum of embeddings only the largest table is the words'; the others are positions or kinds.
"""

from paddle_rbt_plugin.pattern import Builder, Occurrence, Pattern, Spec
from paddle_rbt_plugin.plugins import hookimpl

SUMMING = {"add", "cast", "scale", "dropout"}


class WordEmbedding(Pattern):
    """An untied word embedding."""

    name = "word_embedding"
    priority = 1  # over a position embedding, which cannot tell the two tables of a sum apart

    def build(self, g: Builder) -> None:
        ids = g.chain({"cast", "slice", "strided_slice"}, g.data("ids"), at_most=2)
        out = g.op("embedding", ids, g.cast(g.param("weight", ndim=2)), name="out")
        if g.choose("summed", "alone") == "summed":
            other = g.op("embedding", g.tensor(), g.param("other", ndim=2))
            g.op("add", g.chain(SUMMING, out, at_most=2), g.chain(SUMMING, other, at_most=2))

    def shard(self, match: Occurrence) -> dict[str, Spec]:
        weight = match.tensor("weight")
        read_elsewhere = any(op.type != "embedding" for op in match.graph.consumers(weight.index))
        smaller = "other" in match and match.tensor("other").shape[0] >= weight.shape[0]
        if read_elsewhere or smaller:
            return {}
        return {"ids": ("dp", ...), "weight": ("mp", None), "out": ("dp", ..., None)}

    dim_names = {"ids": ("batch", ...), "weight": ("vocabulary", "hidden size")}


@hookimpl
def register_patterns(register):
    register(WordEmbedding)
