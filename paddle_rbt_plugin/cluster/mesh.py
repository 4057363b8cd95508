"""Process meshes: the ranks of one pipeline stage arranged by parallel axes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ClusterError
from ..spelling import counted
from .cluster import Cluster, GroupLink


@dataclass(frozen=True)
class ProcessMesh:
    """``shape[i]`` ranks along axis ``axes[i]``; ``ranks`` lists them row by row, the last axis running fastest."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    experts: str = ""
    """The axis along which ranks hold different experts of a mixture: what is sharded along ``ep`` is sharded along it. Empty
    where every rank holds all of them."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    def index(self, axis: str | None) -> int:
        """Position of an axis, as dims mappings say it; -1 for one the mesh lacks."""
        if axis == "ep" and self.experts:
            axis = self.experts
        return self.axes.index(axis) if axis in self.axes else -1

    def degree(self, axis: str) -> int:
        """Ranks along an axis; 1 for an axis the mesh lacks."""
        place = self.index(axis)
        return self.shape[place] if place >= 0 else 1

    def coordinate(self, rank: int, axis: str) -> int:
        """Position of a rank along an axis; 0 along an axis the mesh lacks. Raises ValueError for a rank it lacks."""
        place = self.ranks.index(rank)
        return place // self._stride(axis) % self.degree(axis) if axis in self.axes else 0

    def group(self, axis: str) -> tuple[int, ...]:
        """The ranks that communicate along ``axis`` with the first rank of the mesh."""
        if axis not in self.axes:
            return self.ranks[:1]
        stride = self._stride(axis)
        return tuple(self.ranks[k * stride] for k in range(self.degree(axis)))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups along ``axis``, each the ranks that differ in nothing but their place on it; together they are the mesh.

        For an axis the mesh lacks, every rank is a group of its own.
        """
        if axis not in self.axes:
            return tuple((rank,) for rank in self.ranks)
        stride = self._stride(axis)
        span = stride * self.degree(axis)
        starts = (block + offset for block in range(0, self.size, span) for offset in range(stride))
        return tuple(self.ranks[start : start + span : stride] for start in starts)

    def _stride(self, axis: str) -> int:
        return math.prod(self.shape[self.axes.index(axis) + 1 :])


def factorisations(devices: int) -> tuple[tuple[int, int, int], ...]:
    """Every (pp, dp, mp) whose product is ``devices``, ordered by pp and then by mp. Raises ClusterError below one device."""
    if devices < 1:
        raise ClusterError(f"{devices} devices cannot be arranged; there must be at least 1")
    return tuple((pp, devices // pp // mp, mp) for pp in _divisors(devices) for mp in _divisors(devices // pp))


def smallest_factor(n: int) -> int:
    """The smallest degree above 1 that divides ``n``; 1 where there is none."""
    return next((p for p in range(2, n + 1) if n % p == 0), 1)


def stage_meshes(
    cluster: Cluster, pp: int, dp: int, mp: int, axes: tuple[str, ...] = ("dp", "mp"), ep: int = 1
) -> tuple[ProcessMesh, ...]:
    """The process mesh of every pipeline stage; stage ``i`` has the ``i``-th run of consecutive ranks. With ``ep`` (1 or
    ``dp``) experts are divided over the ranks of dp.

    The last of ``axes`` runs over neighbouring ranks, so that it stays inside a machine before it crosses one. An axis of
    degree 1 is left out; one device alone is the mesh ``("dp",)`` of shape ``(1,)``. Raises ClusterError unless the degrees
    use every device of the cluster and ``axes`` names dp and mp once each.
    """
    degrees = {"dp": dp, "mp": mp}
    if sorted(axes) != sorted(degrees):
        raise ClusterError(f"the axes of a stage are ('dp', 'mp') or ('mp', 'dp'), not {axes!r}")
    if ep not in (1, dp):
        raise ClusterError(f"ep {ep} is neither 1 nor dp {dp}: experts are divided over all ranks of dp, or not at all")
    if min(pp, dp, mp) < 1 or pp * dp * mp != cluster.device_count:
        raise ClusterError(
            f"pp {pp} x dp {dp} x mp {mp} does not use the {counted(cluster.device_count, 'device')} of {cluster} exactly"
        )
    kept = tuple(axis for axis in axes if degrees[axis] > 1) or ("dp",)
    shape = tuple(degrees[axis] for axis in kept)
    size, experts = dp * mp, "dp" if ep > 1 else ""
    return tuple(ProcessMesh(kept, shape, tuple(range(stage * size, (stage + 1) * size)), experts) for stage in range(pp))


def axis_link(mesh: ProcessMesh, axis: str, cluster: Cluster) -> GroupLink:
    """The slowest link that any group along ``axis`` communicates over. Raises ClusterError for ranks the cluster lacks."""
    links = (cluster.link(group) for group in mesh.groups(axis))
    return min(links, key=lambda link: (link.level == "intra", link.bandwidth))


def describe_axis(mesh: ProcessMesh, axis: str, cluster: Cluster) -> str:
    """Where the groups of an axis communicate, for messages: ``mp 16 crosses machines of 8``."""
    link = axis_link(mesh, axis, cluster)
    verb = "crosses" if link.level == "inter" else "stays inside"
    return f"{axis} {mesh.degree(axis)} {verb} machines of {link.devices_per_machine}"


def _divisors(n: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))
