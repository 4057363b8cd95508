"""Head with a weight of its own: cross_entropy(x W + b), or x V^T with V [vocabulary, hidden]; one prediction per token.

Column parallel: each rank of ``mp`` computes its slice of the vocabulary. A weight that is looked up as well is a tied
embedding's.
"""

from paddle_rbt_plugin.pattern import Builder, Occurrence, Pattern, Spec
from paddle_rbt_plugin.plugins import hookimpl

LOGIT_OPS = {"cast", "reshape", "scale", "slice", "strided_slice", "transpose", "flatten", "tanh"}


class LMHead(Pattern):
    """The projection to the vocabulary, before the loss."""

    name = "lm_head"

    def build(self, g: Builder) -> None:
        x = g.tensor("x", ndim=3)
        if g.choose("in, out", "out, in") == "in, out":
            logits = g.linear(x, g.param("weight", ndim=2), g.param("bias", ndim=1))
        else:
            weight = g.cast(g.param("transposed_weight", ndim=2))
            logits = g.op("matmul", g.cast(x), weight, attrs={"transpose_y": True})
        g.op("cross_entropy_with_softmax", g.chain(LOGIT_OPS, logits, at_most=6))

    def shard(self, match: Occurrence) -> dict[str, Spec]:
        weight = match.tensor("weight" if "weight" in match else "transposed_weight")
        if any(op.type == "embedding" for op in match.graph.consumers(weight.index)):
            return {}
        return {
            "x": ("dp", None, None),
            "weight": (None, "mp"),
            "transposed_weight": ("mp", None),
            "bias": ("mp",),
        }

    dim_names = {
        "x": ("batch", "sequence", "hidden size"),
        "weight": ("hidden size", "vocabulary"),
        "transposed_weight": ("vocabulary", "hidden size"),
        "bias": ("vocabulary",),
    }


@hookimpl
def register_patterns(register):
    register(LMHead)
