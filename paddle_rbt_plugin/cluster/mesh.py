"""Process meshes: the ranks of one pipeline stage arranged by parallel axes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessMesh:
    """``shape[i]`` ranks along axis ``axes[i]``; ``ranks`` lists them row by row, the last axis running fastest."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    def degree(self, axis: str) -> int:
        """Ranks along an axis; 1 for an axis the mesh lacks."""
        return self.shape[self.axes.index(axis)] if axis in self.axes else 1

    def group(self, axis: str) -> tuple[int, ...]:
        """The ranks that communicate along ``axis`` with the first rank of the mesh."""
        if axis not in self.axes:
            return self.ranks[:1]
        i = self.axes.index(axis)
        stride = 1
        for n in self.shape[i + 1 :]:
            stride *= n
        return tuple(self.ranks[k * stride] for k in range(self.shape[i]))
