"""What stages run on: devices and networks. Runs of ranks that lie alike in equal machines are one ``Machine``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paddle_rbt_plugin.cluster import Cluster, MachineGroup, ProcessMesh
from paddle_rbt_plugin.cost.candidate import Precision
from paddle_rbt_plugin.cost.communication import GroupNetwork, collective_seconds, group_network
from paddle_rbt_plugin.cost.compute import ComputeDevice
from paddle_rbt_plugin.cost.constants import DEFAULT, Constants, constants_on


@dataclass(frozen=True, eq=False)
class Machine:
    """What the ranks of a mesh are: their device, and the network of each mesh axis."""

    name: str
    memory: int
    """Bytes."""
    device: ComputeDevice
    networks: Mapping[str, GroupNetwork]
    constants: Constants

    def network(self, axis: str) -> GroupNetwork | None:
        """The network along an axis; None where there is nobody to send to."""
        found = self.networks.get(axis)
        return None if found is None or found.ranks == 1 else found


class Machines:
    """The machines of a cluster."""

    def __init__(self, cluster: Cluster, precision: Precision, constants: Constants = DEFAULT):
        self.cluster = cluster
        self.constants = constants_on(cluster.groups, constants)
        self._precision = precision
        self._stated = constants
        self._machines: dict[tuple[object, ...], Machine] = {}
        self._pairs: dict[tuple[int, int], GroupNetwork] = {}
        self._groups_of_parts: dict[tuple[int, int, int], GroupNetwork] = {}

    def on(self, cluster: Cluster) -> Machines:
        """Those of another cluster."""
        return Machines(cluster, self._precision, self._stated)

    def of(self, mesh: ProcessMesh, first: int) -> Machine:
        """What a stage on ``mesh``, moved to begin at rank ``first``, runs on; the slowest and smallest of its devices where
        they differ."""
        key = (mesh.axes, mesh.shape, *self._place(first, mesh.size))
        if key not in self._machines:
            groups = self._groups(first, mesh.size)
            device = min((g.device for g in groups), key=lambda d: d.flops(self._precision))
            bandwidth = min(g.device.memory_bandwidth for g in groups)
            self._machines[key] = Machine(
                device.name,
                min(g.device.memory for g in groups),
                ComputeDevice(device.flops(self._precision), bandwidth),
                _networks(mesh, first, self.cluster),
                constants_on(groups, self._stated),
            )
        return self._machines[key]

    def pair(self, here: int, there: int) -> GroupNetwork:
        """The network between two ranks."""
        if (here, there) not in self._pairs:
            self._pairs[here, there] = group_network(self.cluster, (here, there))
        return self._pairs[here, there]

    def regroup_seconds(self, nbytes: float, old: int, new: int, ranks: int, first: int) -> float:
        """Seconds to bring a tensor of ``nbytes`` per rank, where fewer ranks share the batch, from ``old`` data-parallel
        parts to ``new`` or back: what was one part of several is gathered, the way round it is cut for nothing."""
        parts, stride = max(old, new) // min(old, new), ranks // max(old, new)
        key = (first % self.cluster.groups[0].devices_per_machine if self.cluster.is_homogeneous else first, parts, stride)
        if key not in self._groups_of_parts:
            group = tuple(first + k * stride for k in range(parts))
            self._groups_of_parts[key] = group_network(self.cluster, group)
        seconds: float = collective_seconds("all_gather", nbytes, self._groups_of_parts[key], self.constants)
        return seconds

    def _groups(self, first: int, size: int) -> list[MachineGroup]:
        found, start = [], 0
        for group in self.cluster.groups:
            if start < first + size and first < start + group.device_count:
                found.append(group)
            start += group.device_count
        return found or [self.cluster.group_of(first)]

    def _place(self, first: int, size: int) -> tuple[int, ...]:
        """Equal for runs of ranks that lie alike in equal machines."""
        if self.cluster.is_homogeneous:
            return (first % self.cluster.groups[0].devices_per_machine,)
        start = 0
        for i, group in enumerate(self.cluster.groups):
            if start <= first and first + size <= start + group.device_count:
                return i, (first - start) % group.devices_per_machine
            start += group.device_count
        return first, size, -1


def _networks(mesh: ProcessMesh, first: int, cluster: Cluster) -> dict[str, GroupNetwork]:
    """The network of each axis of the mesh when its first rank is ``first``."""
    shift = first - mesh.ranks[0]
    return {axis: group_network(cluster, tuple(r + shift for r in mesh.group(axis))) for axis in mesh.axes}
