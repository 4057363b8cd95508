"""Gated feed-forward network whose gate and up projection are one weight: (act(gate part) * up part of x W + b) Wd + bd.

Column parallel, then row parallel. The gate's columns come first and the other half after them, so a rank's columns are not
its share of both: weight and projection are divided all the same, and Paddle gathers their result before it is cut.
"""

from paddle_rbt_plugin.pattern import Builder, Occurrence, Pattern, Spec
from paddle_rbt_plugin.plugins import hookimpl

from .ffn import FFN

ACTIVATIONS = {"silu", "swish", "gelu", "relu", "sigmoid"}
PARTING = {"split", "split_with_num", "slice", "strided_slice"}


class FusedGatedFFN(Pattern):
    """One projection to both halves of a gate, and one back."""

    name = "fused_gated_ffn"

    def build(self, g: Builder) -> None:
        both = g.linear(g.tensor("x"), g.param("gate_up_weight", ndim=2), g.param("gate_up_bias", ndim=1))
        if g.choose("composed", "fused") == "composed":
            gate, up = (g.chain(PARTING, both, at_most=1) for _ in range(2))
            wide = g.op("multiply", g.op(ACTIVATIONS, gate), up)
        else:
            wide = g.op("swiglu", g.chain(PARTING, both, at_most=1), name="swiglu")
        FFN.project_back(g, wide)

    def shard(self, match: Occurrence) -> dict[str, Spec]:
        swiglu = match.producer("swiglu") if "swiglu" in match else None
        if swiglu is not None and not all(_is_part(match, operand) for operand in swiglu.operands[1:]):
            return {}  # gate and up have weights of their own
        return {
            "x": ("dp", ..., None),
            "gate_up_weight": (None, "mp"),
            "gate_up_bias": ("mp",),
            "down_weight": ("mp", None),
            "down_bias": (None,),
        }

    dim_names = {
        "x": ("batch", ..., "hidden size"),
        "gate_up_weight": ("hidden size", "twice the feed-forward size"),
        "down_weight": ("feed-forward size", "hidden size"),
    }


def _is_part(match: Occurrence, tensor: int) -> bool:
    producer = match.graph.producer(tensor)
    return producer is not None and producer.type in PARTING


@hookimpl
def register_patterns(register):
    register(FusedGatedFFN)
