"""To what the operands of an op are brought before it is built, where Paddle does not build it on them as they lie, or builds
something else.

Planning asks Paddle about operands that lie so, and the hand-over reshards them so: both follow the functions here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paddle_rbt_plugin.completion.placement import Placement

SUMMING = frozenset(
    {"add_n", "addmm", "bmm", "c_embedding", "conv2d", "conv2d_transpose", "conv3d", "depthwise_conv2d", "dot", "embedding"}
    | {"einsum", "fused_gemm_epilogue", "matmul", "mean", "mean_all", "mm", "moe_combine", "mv", "squared_l2_norm", "sum"}
)
"""Ops that may leave sums, or averages, over ranks to be finished: what a rank makes of its part is a summand. Paddle says so
of ``p_norm`` and ``logsumexp`` of a sharded dimension as well, where it is not."""
_SUMS = ("sum", "avg")
GRADIENTS_MAY_BE_PARTIAL = frozenset({"cast", "reshard"})
"""Ops whose gradient ops may read partial gradients. All others get whole sums (``distributed_ops.finished``), so the gradient
of a parameter that is cast is summed once a step, as the gradient of any parameter."""


def less_sharded(placements: Sequence[Placement]) -> list[tuple[Placement, ...]]:
    """What the operands of an op that cannot be built on ``placements`` are brought to, in the order in which it is tried:
    sharded along their first dimension only, which is mostly the batch, then whole. None where they are whole."""
    by_batch = tuple(Placement((*p.dims_mapping[:1], *(-1,) * (len(p.dims_mapping) - 1))) for p in placements)
    whole = tuple(Placement.replicated(len(p.dims_mapping)) for p in placements)
    given = tuple(placements)
    return [other for other in dict.fromkeys((by_batch, whole)) if given not in (other, whole)]


def wrongly_summed(type_: str, made: Iterable[Placement]) -> frozenset[int]:
    """The mesh axes along which an op that makes its results so claims to leave summands, and does not."""
    if type_ in SUMMING:
        return frozenset()
    return frozenset(axis for placement in made for axis, reduction in placement.partial if reduction in _SUMS)


def whole_along(placements: Sequence[Placement], axes: Iterable[int]) -> tuple[Placement, ...]:
    """The placements without some mesh axes."""
    gone = frozenset(axes)
    return tuple(Placement(tuple(-1 if axis in gone else axis for axis in p.dims_mapping)) for p in placements)
