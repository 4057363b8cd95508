"""Which collectives bring a tensor from one placement to another.

Per mesh axis: partial to replicated is an all-reduce, partial to sharded a reduce-scatter, sharded to replicated an
all-gather, sharded to another dimension an all-to-all; replicated to sharded is a local slice. Paddle resolves the axes of
a mesh one after the other, partial axes first, so a later change works on what the earlier ones left.
"""

from __future__ import annotations

from dataclasses import replace

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.work import Collective, CollectiveKind, Phase, Value


def collectives_between(value: Value, target: Placement, mesh: ProcessMesh, phase: Phase) -> tuple[Collective, ...]:
    """The collectives that take ``value`` from its placement to ``target``, in order; none where they are equal."""
    steps: list[Collective] = []
    current = value
    for axis, kind, message_is_result, placement in _steps(value.placement, target):
        result = replace(current, placement=placement)
        if kind is not None and mesh.shape[axis] > 1:
            steps.append(Collective(kind, mesh.axes[axis], result if message_is_result else current, phase))
        current = result
    return tuple(steps)


def _steps(have: Placement, want: Placement) -> list[tuple[int, CollectiveKind | None, bool, Placement]]:
    """Per change of one axis: the axis, its collective, whether the message is the result, and the placement after it."""
    steps: list[tuple[int, CollectiveKind | None, bool, Placement]] = []
    dims, partial = list(have.dims_mapping), dict(have.partial)
    wanted_partial = dict(want.partial)

    def record(axis: int, kind: CollectiveKind | None, message_is_result: bool = False) -> None:
        steps.append((axis, kind, message_is_result, Placement(tuple(dims), tuple(sorted(partial.items())))))

    for axis in sorted(set(partial) - set(wanted_partial)):
        del partial[axis]
        target = _dim_of(want, axis)
        if target is None or dims[target] >= 0:
            record(axis, "all_reduce")
        else:
            dims[target] = axis
            record(axis, "reduce_scatter")
    for dim, axis in enumerate(have.dims_mapping):
        target = _dim_of(want, axis) if axis >= 0 else dim
        if axis < 0 or target == dim:
            continue
        dims[dim] = -1
        if target is None or dims[target] >= 0:
            record(axis, "all_gather", message_is_result=True)
        else:
            dims[target] = axis
            record(axis, "all_to_all")
    return steps


def _dim_of(placement: Placement, axis: int) -> int | None:
    return placement.dims_mapping.index(axis) if axis in placement.dims_mapping else None
