"""Local sizes of values: what one rank stores of a tensor in one micro step.

The traced program is in float32. What a float32 value is stored as is decided by the training precision: two bytes under
fp16 and bf16 (Paddle's AMP level O2, Megatron's mixed precision), except what the loss works on, which stays in float32.
Under sequence parallelism (arXiv 2205.05198, section 4.2.2) a hidden state that tensor parallelism replicates is split over
the mp group along the sequence.

Sizes are arrays: a row per micro batch, a column per value. Values of equal sizes share a column.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.work import Value
from paddle_rbt_plugin.cost.candidate import Precision
from paddle_rbt_plugin.cost.op_types import base_name
from paddle_rbt_plugin.graph import DTYPE_BYTES


class Term(NamedTuple):
    """A part of a sum of bytes: so many times what a value needs; ``stored`` counts a split sequence as its part."""

    value: int
    times: float = 1.0
    stored: bool = True


class Extent(NamedTuple):
    """A product of dimensions, such as the rows of a matrix: (value, dimension) of what to multiply and to divide by."""

    over: tuple[tuple[int, int], ...] = ()
    under: tuple[tuple[int, int], ...] = ()
    times: float = 1.0


class _Row(NamedTuple):
    shape: tuple[int, ...]
    placement: Placement
    batch_dim: int | None
    itemsize: int
    can_split: bool


class Values:
    """Numbers the values of some segments, on a mesh with the given axes, for a ``SizeTable``."""

    def __init__(self, axes: Sequence[str], precision: Precision):
        self.half = precision != "fp32"
        self.mp = axes.index("mp") if "mp" in axes else None
        self.rows: dict[_Row, int] = {}

    def table(self) -> SizeTable:
        """The sizes of all values that were numbered."""
        return SizeTable(list(self.rows))


class Columns:
    """The columns of the values of one segment, of which those named in ``float32`` stay in float32."""

    def __init__(self, values: Values, float32: Collection[str] = ()):
        self.half = values.half
        self._values = values
        self._float32 = float32
        self._known: dict[Value, int] = {}

    def __getitem__(self, value: Value) -> int:
        found = self._known.get(value)
        if found is None:
            row = _Row(value.shape, value.placement, value.batch_dim, self.itemsize(value), self._can_split(value))
            found = self._known[value] = self._values.rows.setdefault(row, len(self._values.rows))
        return found

    def itemsize(self, value: Value) -> int:
        """Bytes of an element."""
        return 2 if self.is_halved(value) else DTYPE_BYTES[value.dtype]

    def is_halved(self, value: Value) -> bool:
        """True for a float32 value of the program that is stored in half precision."""
        return self.half and value.dtype == "float32" and base_name(value.name) not in self._float32

    def _can_split(self, value: Value) -> bool:
        """True for a hidden state that sequence parallelism splits: an intermediate value that grows with the batch and
        that the mp group would otherwise replicate."""
        return (
            value.kind == "var"
            and value.batch_dim is not None
            and len(value.shape) > 1
            and base_name(value.name) not in self._float32
            and self._values.mp not in value.placement.dims_mapping
            and all(axis != self._values.mp for axis, _ in value.placement.partial)
        )


class SizeTable:
    """Sizes of values on any mesh, for any micro batch."""

    def __init__(self, rows: Sequence[_Row]):
        self.count = len(rows)
        self.width = max((len(row.shape) for row in rows), default=0)
        """Dimensions of the value that has most; the others have further ones of size 1."""
        self._shape = np.ones((self.count, self.width))
        self._axis = np.full((self.count, self.width), -1)
        for i, row in enumerate(rows):
            self._shape[i, : len(row.shape)] = row.shape
            self._axis[i, : len(row.shape)] = row.placement.dims_mapping
        self._grows = np.array([i for i, row in enumerate(rows) if row.batch_dim is not None], int)
        self._batch_dim = np.array([row.batch_dim for row in rows if row.batch_dim is not None], int)
        self._itemsize = np.array([row.itemsize for row in rows], float)
        self._can_split = np.array([row.can_split for row in rows], bool)

    def local(self, mesh: ProcessMesh, batch_scale: np.ndarray, sequence_parallel: bool) -> LocalSizes:
        """Sizes on one rank of ``mesh``, one row for each of ``batch_scale``: the batch that all data-parallel ranks hold
        together in a micro step, over the batch of the traced program. A dimension that does not divide is rounded up, as
        Paddle's largest part is; but a rank may hold a part of a sample (context parallelism), so that the dimension that
        grows with the batch need not be whole."""
        ranks = np.array([*mesh.shape, 1])[self._axis]
        dims = np.repeat(np.ceil(self._shape / ranks)[None], len(batch_scale), axis=0)
        grows, d = self._grows, self._batch_dim
        dims[:, grows, d] = self._shape[grows, d] * batch_scale[:, None] / ranks[grows, d]
        nbytes = dims.prod(-1) * self._itemsize
        parts = mesh.degree("mp") if sequence_parallel else 1
        return LocalSizes(dims, nbytes, nbytes / np.where(self._can_split, parts, 1))

    def sums(self, sums: Sequence[Sequence[Term]]) -> Sums:
        """Sums of bytes, to be asked of ``local`` sizes."""
        terms = [some or (Term(0, 0.0),) for some in sums]
        every = list(chain.from_iterable(terms))
        place = np.array([t.value + t.stored * self.count for t in every], int)
        starts = np.cumsum([0, *map(len, terms)])[:-1]
        return Sums(place, np.array([t.times for t in every], float), starts)

    def extents(self, extents: Sequence[Extent]) -> Extents:
        """Products of dimensions, to be asked of ``local`` sizes."""
        times = np.array([e.times for e in extents], float)
        return Extents(self._places([e.over for e in extents]), self._places([e.under for e in extents]), times)

    def _places(self, factors: Sequence[Sequence[tuple[int, int]]]) -> np.ndarray:
        """Positions among all dimensions of all values, behind which a one stands for no factor."""
        found = np.full((len(factors), max(map(len, factors), default=0)), self.count * self.width)
        for i, some in enumerate(factors):
            found[i, : len(some)] = [value * self.width + d for value, d in some]
        return found


class Sums(NamedTuple):
    """Sums of bytes: places among the bytes and the stored bytes of all values, how often each counts, and where each sum
    starts."""

    place: np.ndarray
    times: np.ndarray
    starts: np.ndarray


class Extents(NamedTuple):
    """Products of dimensions: extents x places of what is multiplied, and of what it is divided by."""

    over: np.ndarray
    under: np.ndarray
    times: np.ndarray


@dataclass(frozen=True, eq=False)
class LocalSizes:
    """Local sizes of values, one row per micro batch."""

    dims: np.ndarray
    """Micro batches x values x dimensions, the sequence unsplit."""
    nbytes: np.ndarray
    """Bytes, the sequence unsplit."""
    stored: np.ndarray
    """Bytes as kept in memory, a split sequence counted as its part."""

    def sums(self, sums: Sums) -> np.ndarray:
        """Micro batches x sums."""
        both = np.concatenate((self.nbytes, self.stored), axis=1)
        return np.add.reduceat(both[:, sums.place] * sums.times, sums.starts, axis=1)

    def extents(self, extents: Extents) -> np.ndarray:
        """Micro batches x extents."""
        count = len(self.dims)
        places = np.concatenate((self.dims.reshape(count, -1), np.ones((count, 1))), axis=1)
        found: np.ndarray = places[:, extents.over].prod(-1) * extents.times
        return found / places[:, extents.under].prod(-1) if extents.under.size else found
