"""Which collectives bring a tensor from one placement to another.

This follows the order in which Paddle's reshard functions resolve a change (static/reshard_funcs, 3.0 to 3.3). First every
dimension whose shard must go is gathered, the last dimension first: an all-gather; on a mesh of one axis a shard that only
moves to another dimension is an all-to-all instead. Then partial axes are reduced: an all-reduce, or a reduce-scatter where
the axis shards a dimension afterwards. What is left, replicated to sharded, is a local slice.
"""

from __future__ import annotations

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.work import Collective, CollectiveKind, Phase, Value


def collectives_between(value: Value, target: Placement, mesh: ProcessMesh, phase: Phase) -> tuple[Collective, ...]:
    """The collectives that take ``value`` from its placement to ``target``, in order; none where they are equal."""
    if value.placement == target:
        return ()
    steps: list[Collective] = []
    current = value
    for axis, kind, message_is_result, placement in _steps(value.placement, target, len(mesh.axes) == 1):
        result = current._replace(placement=placement)
        if mesh.shape[axis] > 1:
            steps.append(Collective(kind, mesh.axes[axis], result if message_is_result else current, phase))
        current = result
    return tuple(steps)


def _steps(have: Placement, want: Placement, one_axis: bool) -> list[tuple[int, CollectiveKind, bool, Placement]]:
    """Per collective: its axis, its kind, whether the message is the result, and the placement after it."""
    steps: list[tuple[int, CollectiveKind, bool, Placement]] = []
    dims, partial = list(have.dims_mapping), dict(have.partial)

    def record(axis: int, kind: CollectiveKind, message_is_result: bool = False) -> None:
        steps.append((axis, kind, message_is_result, Placement(tuple(dims), tuple(sorted(partial.items())))))

    for dim in reversed(range(len(dims))):
        axis = dims[dim]
        if axis < 0 or want.dims_mapping[dim] == axis:
            continue
        target = _dim_of(want, axis)
        dims[dim] = -1
        if one_axis and target is not None:
            dims[target] = axis
            record(axis, "all_to_all")
        else:
            record(axis, "all_gather", message_is_result=True)
    for axis in sorted(set(partial) - {axis for axis, _ in want.partial}):
        del partial[axis]
        target = _dim_of(want, axis)
        if target is not None:
            dims[target] = axis
        record(axis, "all_reduce" if target is None else "reduce_scatter")
    return steps


def _dim_of(placement: Placement, axis: int) -> int | None:
    return placement.dims_mapping.index(axis) if axis in placement.dims_mapping else None
