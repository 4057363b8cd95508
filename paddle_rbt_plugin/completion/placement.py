"""How a tensor lies on a process mesh, in a notation that both of Paddle's IRs can be translated to."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from paddle_rbt_plugin.cluster.mesh import ProcessMesh


class Placement(NamedTuple):
    """``dims_mapping[d]`` is the mesh axis (its position) that shards tensor dimension ``d``, or -1. ``partial`` lists the
    mesh axes along which every rank holds a summand only, each with its reduction (``sum``, ``avg``, ``max``, ...).

    A named tuple, since all work is remembered by placements, and tuples are hashed and compared in C."""

    dims_mapping: tuple[int, ...]
    partial: tuple[tuple[int, str], ...] = ()

    @staticmethod
    @cache
    def replicated(ndim: int) -> Placement:
        return Placement((-1,) * ndim)

    def is_sharded(self) -> bool:
        return any(axis >= 0 for axis in self.dims_mapping)

    def finished(self) -> Placement:
        """The same without summands: every rank holds whole values of its part."""
        return Placement(self.dims_mapping) if self.partial else self

    def local_shape(self, shape: tuple[int, ...], mesh: ProcessMesh) -> tuple[int, ...]:
        """Shape on one rank; a dimension that does not divide is rounded up, as Paddle's largest part is."""
        return tuple(n if axis < 0 else -(-n // mesh.shape[axis]) for n, axis in zip(shape, self.dims_mapping, strict=True))
