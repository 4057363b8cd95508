"""Query, key and value from one weight: attention(parts of x W + b).

Column parallel, and what that means depends on the order of the columns. Where heads (or the groups of grouped queries) run
slowest, [heads, 3, d], each rank of ``mp`` holds whole heads, and the reshaped tensor says how many there are. Where query,
key and value run slowest, [3, heads, d], a rank's columns are no heads: weight and projection are divided all the same,
and Paddle gathers their result, for the parameter cannot be stored in another order than the program reads it.
"""

from paddle_rbt_plugin.pattern import HEAD_OPS, Builder, Occurrence, Pattern, Spec, attention_core
from paddle_rbt_plugin.plugins import hookimpl

PARTING = {"split", "split_with_num", "unbind", "slice", "strided_slice"}


class FusedQKV(Pattern):
    """The one projection of a self-attention."""

    name = "fused_qkv"

    def build(self, g: Builder) -> None:
        projected = g.linear(g.tensor("x"), g.param("weight", ndim=2), g.param("bias", ndim=1))
        if g.choose("heads, then parts", "parts, then heads") == "heads, then parts":
            projected = g.op("reshape", projected, name="heads", where=lambda t: t.ndim in (4, 5))
        attention_core(g, *(g.chain(HEAD_OPS, projected, at_most=14) for _ in range(3)))

    def shard(self, match: Occurrence) -> dict[str, Spec]:
        specs: dict[str, Spec] = {"x": ("dp", ..., None), "weight": (None, "mp"), "bias": ("mp",)}
        if "heads" in match and parted_dim(match, "heads") != 2:
            specs["heads"] = ("dp", None, "mp", ..., None)
        return specs

    dim_names = {
        "x": ("batch", ..., "hidden size"),
        "heads": ("batch", "sequence", "attention heads or their groups", ..., "head size"),
    }


def parted_dim(match: Occurrence, name: str) -> int | None:
    """The dimension of a tensor along which its readers cut it, a transpose in between included; None if nothing does."""
    tensor = match.tensor(name)
    order = tuple(range(tensor.ndim))
    readers = match.graph.consumers(tensor.index)
    if readers and readers[0].type == "transpose":
        order = tuple(readers[0].attrs["perm"])
        readers = match.graph.consumers(readers[0].results[0])
    for op in readers:
        axes = op.attrs.get("axes", (op.attrs.get("axis"),))
        if op.type in PARTING and axes[0] is not None:
            return order[axes[0] % tensor.ndim]
    return None


@hookimpl
def register_patterns(register):
    register(FusedQKV)
