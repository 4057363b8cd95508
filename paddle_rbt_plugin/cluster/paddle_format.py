"""Paddle's own cluster description: ``paddle.distributed.auto_parallel.static.cluster``, as JSON or as object.

Paddle lists machines with devices and links; bandwidth is in GB/s, latency in milliseconds, memory in GB, 0 standing for
"not known". It knows no memory bandwidth, and its own generator writes rates without tensor cores for a V100 and sparse ones
for an A100. So the device comes from the catalogue by its model name; bandwidths and latencies that the description states
for links between accelerators win over the catalogue, and ranks are the accelerators in order, machine by machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import ClusterError
from .catalogue import MoreDevices, device_names, recognise
from .cluster import Link, MachineGroup
from .fields import Fields

_NO_ACCELERATOR = ("CPU", "NIC", "UNKNOWN")


def is_paddle_cluster(value: object) -> bool:
    """Whether a value looks like Paddle's ``Cluster`` object; Paddle itself is not imported."""
    return isinstance(getattr(value, "machines", None), Mapping) and hasattr(value, "mesh_group")


def describe_paddle_cluster(cluster: Any) -> dict[str, Any]:
    """The content of Paddle's JSON for its ``Cluster`` object."""
    machines = list(cluster.machines.values())
    if cluster.mesh_group is not None:
        machines += [machine for mesh in cluster.mesh_group.meshes.values() for machine in mesh.machines.values()]
    return {"machines": [_describe_machine(machine) for machine in machines]}


def _describe_machine(machine: Any) -> dict[str, Any]:
    def global_id(end: Any) -> Any:
        return getattr(end, "global_id", end)

    return {
        "hostname": machine.hostname,
        "devices": [
            {"global_id": d.global_id, "type": getattr(d.type, "name", d.type), "model": d.model, "memory": d.memory}
            for d in machine.devices.values()
        ],
        "links": [
            {
                "source_global_id": global_id(link.source),
                "target_global_id": global_id(link.target),
                "bandwidth": link.bandwidth,
                "latency": link.latency,
            }
            for link in machine.links.values()
        ],
    }


def read_paddle_machines(content: Mapping[str, Any], source: str, more: MoreDevices = dict) -> tuple[MachineGroup, ...]:
    """Groups of equal consecutive machines. Raises ClusterError that names the machine and the key."""
    machines = [Fields.of(m, source, f"machines[{i}]") for i, m in enumerate(content["machines"])]
    if not machines:
        raise ClusterError(f"{source}: machines: the list is empty")
    homes: dict[int, int] = {}
    for i, machine in enumerate(machines):
        for number in _accelerators(machine):
            if number in homes:
                raise machine.error("devices", f"global_id {number} occurs twice; it numbers the devices of the whole cluster")
            homes[number] = i
    groups: list[MachineGroup] = []
    for i, machine in enumerate(machines):
        group = _read_machine(i, machine, homes, more)
        if groups and replace(groups[-1], machines=1) == group:
            groups[-1] = replace(groups[-1], machines=groups[-1].machines + 1)
        else:
            groups.append(group)
    return tuple(groups)


def _rows(machine: Fields, key: str) -> list[Fields]:
    rows = machine.data.get(key, [])
    if not isinstance(rows, list | tuple):
        raise machine.error(key, "expected a list")
    return [Fields.of(row, machine.source, f"{machine.path}.{key}[{i}]") for i, row in enumerate(rows)]


def _devices(machine: Fields) -> list[tuple[str, Fields]]:
    return [(str(row.data.get("type", "UNKNOWN")).upper(), row) for row in _rows(machine, "devices")]


def _accelerators(machine: Fields) -> dict[int, Fields]:
    found: dict[int, Fields] = {}
    for kind, row in _devices(machine):
        if kind not in _NO_ACCELERATOR:
            number = _identity(row, "global_id")
            if number in found:
                raise machine.error("devices", f"global_id {number} occurs twice; it numbers the devices of the whole cluster")
            found[number] = row
    return found


def _identity(row: Fields, key: str) -> int:
    value = row.data.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise row.error(key, f"expected the number of a device, not {value!r}")
    return value


def _read_machine(index: int, machine: Fields, homes: Mapping[int, int], more: MoreDevices) -> MachineGroup:
    accelerators = _accelerators(machine)
    if not accelerators:
        raise machine.error("devices", "no accelerator among them; a device needs e.g. type: GPU, model: Tesla V100-SXM2-32GB")
    models = {row.text("model") for row in accelerators.values()}
    if len(models) > 1:
        raise machine.error("devices", f"different models in one machine: {', '.join(sorted(models))}; they must be equal")
    first = next(iter(accelerators.values()))
    entry = recognise(first.text("model"), more)
    if entry is None:
        raise first.error(
            "model",
            f"{first.text('model')!r} is not in the catalogue ({', '.join(device_names(more))}), and Paddle's format lacks "
            "the memory bandwidth; describe the device in a file with device, tflops, memory, memory_bandwidth, intra_link "
            "and nic",
        )
    usual = entry.group(1, len(accelerators))
    inside, across = [], []
    for row in _rows(machine, "links"):
        ends = homes.get(_identity(row, "source_global_id")), homes.get(_identity(row, "target_global_id"))
        if ends == (index, index):
            inside.append(row)
        elif None not in ends:
            across.append(row)
    if any(_figure(row, "bandwidth") for row in across):
        # Paddle costs a crossing message at this bandwidth, so it is one card's; a machine has as many as it lists.
        usual = replace(usual, nics=max(1, sum(kind == "NIC" for kind, _ in _devices(machine))))
    return replace(usual, intra_link=_slowest(inside, usual.intra_link), nic=_slowest(across, usual.nic))


def _slowest(rows: list[Fields], usual: Link) -> Link:
    bandwidths = [b for row in rows if (b := _figure(row, "bandwidth"))]
    latencies = [t for row in rows if (t := _figure(row, "latency"))]
    return Link(
        bandwidth=min(bandwidths) * 1e9 if bandwidths else usual.bandwidth,
        latency=max(latencies) * 1e-3 if latencies else usual.latency,
    )


def _figure(row: Fields, key: str) -> float:
    """A figure above zero, or 0 where Paddle says that it is not known."""
    value = row.data.get(key)
    return 0.0 if value is None or value == 0 else row.positive(key)
