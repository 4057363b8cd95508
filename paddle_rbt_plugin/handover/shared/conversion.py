"""Meshes and placements of a plan as Paddle's own classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.distributed_ops import reduce_type
from paddle_rbt_plugin.completion.placement import Placement

Placements = Sequence[Any]
"""Paddle's placements, one per mesh axis."""


def paddle_mesh(mesh: ProcessMesh) -> Any:
    """The mesh as Paddle's own class."""
    return paddle.distributed.ProcessMesh(np.array(mesh.ranks).reshape(mesh.shape), dim_names=list(mesh.axes))


def paddle_placements(placement: Placement, axes: int) -> list[Any]:
    """Paddle's placements, one per mesh axis."""
    dims, partial = placement.dims_mapping, dict(placement.partial)

    def along(axis: int) -> Any:
        if axis in dims:
            return dist.Shard(dims.index(axis))
        return dist.Partial(reduce_type(partial[axis])) if axis in partial else dist.Replicate()

    return [along(axis) for axis in range(axes)]
