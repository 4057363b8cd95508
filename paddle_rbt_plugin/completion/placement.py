"""How a tensor lies on a process mesh, in a notation that both of Paddle's IRs can be translated to."""

from __future__ import annotations

from collections.abc import Collection
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

    @staticmethod
    @cache
    def along(axis: int, ndim: int, dim: int | None = 0) -> Placement:
        """One dimension along a mesh axis, and the others whole; all whole if there is no such dimension or axis."""
        return Placement(tuple(axis if i == dim else -1 for i in range(ndim)))

    def summands(self, split: Collection[int]) -> Placement:
        """How ranks hold the gradient of an operand that an op needs so, when they compute parts of the op along the mesh axes
        ``split``."""
        return Placement(self.dims_mapping, tuple((axis, "sum") for axis in sorted({*split}.difference(self.dims_mapping))))

    def is_sharded(self) -> bool:
        return any(axis >= 0 for axis in self.dims_mapping)

    def finished(self) -> Placement:
        """The same without summands: every rank holds whole values of its part."""
        return Placement(self.dims_mapping) if self.partial else self

    def of_gradient(self, value: Placement) -> Placement:
        """What a gradient that lies so is brought to before the op that made ``value`` reads it: whole sums, of which a rank
        takes the part that it holds of the value where it holds all of the gradient."""
        free = {axis for axis in value.dims_mapping if axis not in self.dims_mapping}
        dims = zip(self.dims_mapping, value.dims_mapping, strict=True)
        return Placement(tuple(other if own < 0 and other in free else own for own, other in dims))

    def local_shape(self, shape: tuple[int, ...], mesh: ProcessMesh) -> tuple[int, ...]:
        """Shape on one rank; a dimension that does not divide is rounded up, as Paddle's largest part is."""
        return tuple(n if axis < 0 else -(-n // mesh.shape[axis]) for n, axis in zip(shape, self.dims_mapping, strict=True))
