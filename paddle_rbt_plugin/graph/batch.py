"""The batch of a program: how many samples it was written for, and which inputs hold one sample in each row.

Callers say so by leaving the first dimension of an input open (``InputSpec([None, 16])``). If every dimension has a size, the
batch is the first dimension that most inputs share. If two sizes are equally frequent, a size above 1 comes before 1, the size
of a mask or bias that is added to every sample; then the size of the inputs with most dimensions, since tables and positions
have no dimension for the samples; then the size that most results in the program have as their first dimension. The order
of the inputs never counts.

Which dimensions of the other tensors grow with the batch follows from these inputs, see ``completion.by_batch``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

OPEN = -1
"""The size of a dimension that the caller leaves open."""


@dataclass(frozen=True)
class Batch:
    """The samples of a program."""

    size: int
    """How many; ``OPEN`` where the caller leaves it open."""
    inputs: frozenset[str]
    """Names of the inputs that hold one sample in each row."""


def find_batches(shapes: Mapping[str, Sequence[int]]) -> list[Batch]:
    """The batches that inputs of these shapes may have: one, several where the shapes leave it undecided, or none where no
    input has a dimension."""
    rows = {name: shape[0] for name, shape in shapes.items() if len(shape)}
    sizes = [OPEN] if OPEN in rows.values() else _likeliest(rows, shapes)
    return [Batch(size, frozenset(name for name, n in rows.items() if n == size)) for size in sizes]


def _likeliest(rows: Mapping[str, int], shapes: Mapping[str, Sequence[int]]) -> list[int]:
    counts = Counter(rows.values())
    most_dims = {size: max(len(shapes[name]) for name, n in rows.items() if n == size) for size in counts}
    rank = {size: (counts[size], size > 1, most_dims[size]) for size in counts}
    best = max(rank.values(), default=None)
    return sorted(size for size in counts if rank[size] == best)


def find_batch(shapes: Mapping[str, Sequence[int]], results: Iterable[Sequence[int]]) -> Batch | None:
    """The batch of a program with inputs of these shapes, whose ops make results of the others; None without inputs."""
    first = Counter(shape[0] for shape in results if len(shape))
    return max(find_batches(shapes), key=lambda batch: (first[batch.size], batch.size), default=None)
