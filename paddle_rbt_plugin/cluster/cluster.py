"""What a cluster is made of, in plain units: FLOP/s, bytes, bytes per second in one direction, seconds.

Ranks run through the groups in order, through the machines of a group in order, and through the devices of a machine in
order: rank 9 of ``2x8:H100`` is device 1 of machine 1. Nothing else maps ranks to devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal

from ..errors import ClusterError
from .fields import Fields

RATED_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")
"""Number formats for which a device may state a rate."""

Level = Literal["intra", "inter"]

GROUP_KEYS = ("machines", "devices_per_machine", "device", "tflops", "memory", "memory_bandwidth", "intra_link", "nic")
"""Keys that describe a group of machines, in files, in dicts and in plans."""
OPTIONAL_KEYS = ("software",)
"""Keys that a group of machines may have beside these."""

SOFTWARE: Mapping[str, Callable[[Fields, str], float]] = MappingProxyType(
    {
        **dict.fromkeys(("matmul_peak", "fused_attention_peak", "memory_peak", "update_peak", "inter_bandwidth"), Fields.share),
        "matmul_tile": Fields.count,
        **dict.fromkeys(("matmul_fill_flop", "collective_passes"), Fields.amount),
        **dict.fromkeys(("kernel_gap_s", "host_launch_s", "collective_launch_s"), Fields.latency),
    }
)
"""What a device may say of the software that runs on it, by constants of the cost model (``cost.constants``), and how each
is read."""


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU process.

    ``tflops`` holds (precision, dense TFLOP/s of matrix products) pairs; ``memory`` is in bytes, ``memory_bandwidth`` in
    bytes per second.
    """

    name: str
    tflops: tuple[tuple[str, float], ...]
    memory: int
    memory_bandwidth: float
    software: tuple[tuple[str, float], ...] = ()
    """What the software on this device makes of the figures, where it was measured: names of SOFTWARE and values."""

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions for which the device has a rate."""
        return tuple(p for p, _ in self.tflops)

    def flops(self, precision: str) -> float:
        """Dense peak in FLOP/s, never a sparse one. Raises ClusterError for a precision that the device lacks."""
        for p, tflops in self.tflops:
            if p == precision:
                return tflops * 1e12
        raise ClusterError(f"{self.name} has no {precision}; it computes in {', '.join(self.precisions)}")


@dataclass(frozen=True)
class Link:
    """``bandwidth`` in bytes per second in one direction; ``latency`` in seconds per message."""

    bandwidth: float
    latency: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data: bytes/s and seconds."""
        return {"bandwidth": self.bandwidth, "latency": self.latency}


@dataclass(frozen=True)
class MachineGroup:
    """``machines`` equal machines of ``devices_per_machine`` equal devices.

    ``intra_link`` is what one device has inside its machine, ``nic`` one of the ``nics`` network cards of a machine.
    """

    machines: int
    devices_per_machine: int
    device: Device
    intra_link: Link
    nic: Link
    nics: int

    @property
    def device_count(self) -> int:
        return self.machines * self.devices_per_machine

    @property
    def inter_link(self) -> Link:
        """All network cards of one machine together."""
        return Link(self.nic.bandwidth * self.nics, self.nic.latency)

    @property
    def short_form(self) -> str:
        return f"{self.machines}x{self.devices_per_machine}:{self.device.name}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data in base units, TFLOP/s for the rates; ``from_dict`` gives the same group back."""
        return {
            "machines": self.machines,
            "devices_per_machine": self.devices_per_machine,
            "device": self.device.name,
            "tflops": dict(self.device.tflops),
            "memory": self.device.memory,
            "memory_bandwidth": self.device.memory_bandwidth,
            "intra_link": self.intra_link.to_dict(),
            "nic": {"count": self.nics, **self.nic.to_dict()},
            **({"software": dict(self.device.software)} if self.device.software else {}),
        }

    @classmethod
    def from_dict(cls, data: object, source: str = "machine group", path: str = "") -> MachineGroup:
        """Reads what ``to_dict`` writes, also with units. Raises ClusterError that names ``source``, ``path`` and key."""
        fields = Fields.of(data, source, path, (*GROUP_KEYS, *OPTIONAL_KEYS))
        rates = fields.section("tflops", RATED_PRECISIONS)
        if not rates.data:
            raise rates.error("", "at least one rate is needed, e.g. {bf16: 312}")
        intra = fields.section("intra_link", ("bandwidth", "latency"))
        nic = fields.section("nic", ("count", "bandwidth", "latency"))
        return cls(
            machines=fields.count("machines"),
            devices_per_machine=fields.count("devices_per_machine"),
            device=Device(
                name=fields.text("device"),
                tflops=tuple((p, rates.positive(p)) for p in RATED_PRECISIONS if p in rates.data),
                memory=fields.memory("memory"),
                memory_bandwidth=fields.bandwidth("memory_bandwidth"),
                software=_read_software(fields),
            ),
            intra_link=Link(intra.bandwidth("bandwidth"), intra.latency("latency")),
            nic=Link(nic.bandwidth("bandwidth"), nic.latency("latency")),
            nics=nic.count("count"),
        )


@dataclass(frozen=True)
class GroupLink:
    """The slowest link over which a group of ranks communicates.

    ``link`` is a device's own link (``intra``) or all network cards of a machine together (``inter``). ``bandwidth``, in
    bytes per second in one direction, is what the group has of it at one machine when every device of that machine
    communicates at once: the cards are shared evenly, so a group of all 8 devices of a machine has all of them and a group
    with 1 device per machine an eighth. ``ranks_per_machine`` is the most ranks of the group in one machine, ``machines`` how
    many it touches, ``devices_per_machine`` the size of the machine with the slowest link.
    """

    level: Level
    link: Link
    bandwidth: float
    ranks_per_machine: int
    machines: int
    devices_per_machine: int


@dataclass(frozen=True)
class Cluster:
    """Groups of equal machines; more than one kind of machine makes a heterogeneous cluster."""

    groups: tuple[MachineGroup, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise ClusterError("a cluster needs at least one group of machines, e.g. '1x8:A100-80G'")

    def __str__(self) -> str:
        return self.short_form

    @property
    def short_form(self) -> str:
        """``NODESxDEVICES:GPU`` joined by ``+``; overridden figures do not show in it."""
        return "+".join(g.short_form for g in self.groups)

    @cached_property
    def device_count(self) -> int:
        return sum(g.device_count for g in self.groups)

    @cached_property
    def machines(self) -> int:
        """Number of machines."""
        return sum(g.machines for g in self.groups)

    @cached_property
    def is_homogeneous(self) -> bool:
        """Whether all machines are equal."""
        return all(replace(g, machines=1) == replace(self.groups[0], machines=1) for g in self.groups)

    def group_of(self, rank: int) -> MachineGroup:
        """The group of machines a rank runs in. Raises ClusterError for a rank the cluster lacks."""
        return self._locate(rank)[0]

    def device_of(self, rank: int) -> Device:
        """The device a rank runs on. Raises ClusterError for a rank the cluster lacks."""
        return self._locate(rank)[0].device

    def machine_of(self, rank: int) -> int:
        """Number of the machine a rank runs in, from 0. Raises ClusterError for a rank the cluster lacks."""
        return self._locate(rank)[1]

    def link(self, ranks: Iterable[int]) -> GroupLink:
        """The slowest link that a group of ranks communicates over; for one rank its own link inside the machine.

        Raises ClusterError for an empty group and for ranks that the cluster lacks.
        """
        located = [self._locate(rank) for rank in ranks]
        if not located:
            raise ClusterError("a group of no ranks has no link")
        members = Counter(machine for _, machine in located)
        groups = {machine: group for group, machine in located}
        most = max(members.values())
        inside = min(groups.values(), key=lambda g: g.intra_link.bandwidth)
        if len(members) == 1:
            link = inside.intra_link
            return GroupLink("intra", link, link.bandwidth, most, 1, inside.devices_per_machine)

        def share(machine: int) -> float:
            group = groups[machine]
            return group.inter_link.bandwidth * members[machine] / group.devices_per_machine

        slowest = min(members, key=share)
        group = groups[slowest]
        return GroupLink("inter", group.inter_link, share(slowest), most, len(members), group.devices_per_machine)

    def with_network(self, bandwidth: float) -> Cluster:
        """The same cluster with ``bandwidth`` bytes per second in one direction out of every machine, over the same NICs."""
        return Cluster(tuple(replace(g, nic=Link(bandwidth / g.nics, g.nic.latency)) for g in self.groups))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; ``from_dict`` gives an equal cluster back."""
        return {"groups": [g.to_dict() for g in self.groups]}

    @classmethod
    def from_dict(cls, data: object, source: str = "cluster") -> Cluster:
        """Reads what ``to_dict`` writes; nothing is filled in from the catalogue. Raises ClusterError that names the key."""
        fields = Fields.of(data, source, known=("groups",))
        groups = fields.data.get("groups")
        if not isinstance(groups, list | tuple) or not groups:
            raise fields.error("groups", "expected a list of groups of machines")
        return cls(tuple(MachineGroup.from_dict(g, source, f"groups[{i}]") for i, g in enumerate(groups)))

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate(g.device_count for g in self.groups))

    def _locate(self, rank: int) -> tuple[MachineGroup, int]:
        if 0 <= rank < self.device_count:
            machines = 0
            for group, end in zip(self.groups, self._ends, strict=True):
                if rank < end:
                    start = end - group.device_count
                    return group, machines + (rank - start) // group.devices_per_machine
                machines += group.machines
        raise ClusterError(f"{self.short_form} has no rank {rank}: its ranks are 0 to {self.device_count - 1}")


def _read_software(fields: Fields) -> tuple[tuple[str, float], ...]:
    if "software" not in fields.data:
        return ()
    software = fields.section("software", tuple(SOFTWARE))
    return tuple((name, read(software, name)) for name, read in SOFTWARE.items() if name in software.data)


def merged(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``override``, sections merged key by key."""
    result = dict(base)
    for key, value in override.items():
        old = result.get(key)
        result[key] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result
