"""Whole outputs of a distributed program, on every rank.

What a program computes lies on its ranks in parts: rows of the batch, columns of the logits, summands of a loss; under a
pipeline some ranks have none of it. Each part has one owner, the first of the ranks that hold it. Every rank adds what it owns
into zeros of the whole shape, and one all-reduce of the job makes the whole of it, exactly but for the order of summands.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_rbt_plugin.errors import HandoverError

_SUM, _AVG = 0, 4
"""Numbers of ``paddle.base.core.ReduceType``."""


@contextmanager
def dygraph() -> Iterator[None]:
    """Lets collectives of dygraph run, whatever mode an engine has left behind."""
    with paddle.base.dygraph.guard(paddle.framework._current_expected_place()), paddle.no_grad():
        yield


@dataclass(frozen=True)
class Layout:
    """Where the parts of a tensor lie: on ``ranks``, arranged as ``mesh``, by the mesh axis of each dimension (-1: whole) and
    the axes along which ranks hold summands, or values to average."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    mesh: tuple[int, ...]
    dims_mapping: tuple[int, ...]
    sums: tuple[int, ...] = ()
    means: tuple[int, ...] = ()

    @classmethod
    def of(cls, value: Any) -> Layout:
        """That of a value of a program. Raises HandoverError for maxima and the like."""
        attr = value.dist_attr()
        if attr is None:  # of a program that nothing distributes
            world = dist.get_world_size()
            return cls(tuple(value.shape), tuple(range(world)), (world,), (-1,) * len(value.shape))
        mesh = attr.process_mesh
        kinds = {axis: int(kind) for axis, kind in attr.partial_status.items()}
        others = [axis for axis, kind in kinds.items() if kind not in (_SUM, _AVG)]
        if others:
            raise HandoverError(f"an output of the program is Partial({kinds[others[0]]}), which cannot be gathered")
        sums = tuple(axis for axis, kind in kinds.items() if kind == _SUM)
        means = tuple(axis for axis, kind in kinds.items() if kind == _AVG)
        return cls(tuple(value.shape), tuple(mesh.process_ids), tuple(mesh.shape), tuple(attr.dims_mapping), sums, means)

    @property
    def is_whole(self) -> bool:
        """Whether every rank of the job holds all of it."""
        used = {axis for axis in (*self.dims_mapping, *self.sums, *self.means) if axis >= 0}
        return len(self.ranks) == dist.get_world_size() and all(self.mesh[axis] == 1 for axis in used)

    def coordinates(self, rank: int) -> tuple[int, ...] | None:
        """Where a rank is in the mesh; None where it is not."""
        if rank not in self.ranks:
            return None
        return tuple(int(i) for i in np.unravel_index(self.ranks.index(rank), self.mesh))

    def part(self, rank: int) -> tuple[slice, ...]:
        """The part that a rank of the mesh holds."""
        at = self.coordinates(rank)
        assert at is not None
        slices = []
        for size, axis in zip(self.shape, self.dims_mapping, strict=True):
            rows = size if axis < 0 else size // self.mesh[axis]
            begin = 0 if axis < 0 else at[axis] * rows
            slices.append(slice(begin, begin + rows))
        return tuple(slices)

    def owns(self, rank: int) -> bool:
        """Whether a rank is the first of those that hold its part."""
        at = self.coordinates(rank)
        used = {*self.dims_mapping, *self.sums, *self.means}
        return at is not None and all(i == 0 for axis, i in enumerate(at) if axis not in used)


def whole(layout: Layout, part: Any) -> np.ndarray:
    """The whole of a tensor of which this rank holds ``part`` (anything where it holds none). All ranks call this.

    A number that a program made of several micro batches has a dimension of its own for them."""
    rank = dist.get_rank()
    array = None if part is None or layout.coordinates(rank) is None else _readable(np.asarray(part))
    if layout.is_whole:
        assert array is not None
        return array
    is_number = int(np.prod(layout.shape)) == 1
    with dygraph():
        if len(layout.ranks) == dist.get_world_size():
            assert array is not None
            dtype, size = str(array.dtype), array.size
        else:  # other pipeline stages know neither
            dtype, size = _known_to_some(array)
        shape = (size,) if is_number else layout.shape
        total = np.zeros(shape, _SUMMABLE.get(dtype, dtype))
        if array is not None and layout.owns(rank):
            mine = (slice(None),) if is_number else layout.part(rank)
            total[mine] = array.reshape(total[mine].shape) / np.prod([layout.mesh[axis] for axis in layout.means], initial=1)
        summed = paddle.to_tensor(total)
        dist.all_reduce(summed)
        found = np.asarray(summed.numpy()).astype(dtype)
    return found.reshape(layout.shape) if found.size == np.prod(layout.shape) else found


_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_SUMMABLE = {"bool": "int32", "float16": "float32", "int16": "int32", "int8": "int32", "uint8": "int32"}
"""What collectives add up instead, without loss."""


def _known_to_some(array: np.ndarray | None) -> tuple[str, int]:
    """The type and the size of an array that not all ranks have."""
    known = [-1, -1] if array is None else [_DTYPES.index(str(array.dtype)), array.size]
    shared = paddle.to_tensor(known, dtype="int64")
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return _DTYPES[int(shared[0])], int(shared[1])


def _readable(array: np.ndarray) -> np.ndarray:
    """bfloat16, which Paddle hands out as its bits, as float32."""
    return (array.astype("uint32") << 16).view("float32") if array.dtype == np.uint16 else array
