"""The devices known by name, from ``devices.yaml``: figures of data sheets, each with its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from types import MappingProxyType

import yaml

from ..errors import ClusterError
from .cluster import MachineGroup
from .fields import suggest


@dataclass(frozen=True)
class CatalogueEntry:
    """A device in its usual machine.

    ``machine`` is one such machine; ``detect`` matches the names that CUDA and Paddle give the device; ``sources`` says for
    each section of ``devices.yaml`` where its figures are from.
    """

    machine: MachineGroup
    detect: str
    sources: tuple[tuple[str, str], ...]

    def group(self, machines: int, devices_per_machine: int) -> MachineGroup:
        """Machines with this device. A machine smaller than usual has network cards in proportion, one at least."""
        usual = self.machine
        nics = usual.nics
        if devices_per_machine < usual.devices_per_machine:
            nics = max(1, nics * devices_per_machine // usual.devices_per_machine)
        return replace(usual, machines=machines, devices_per_machine=devices_per_machine, nics=nics)


@cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """All known devices by name."""
    text = resources.files(__package__).joinpath("devices.yaml").read_text(encoding="utf-8")
    entries = {}
    for name, data in yaml.safe_load(text).items():
        detect, sources = data.pop("detect"), data.pop("sources")
        machine = MachineGroup.from_dict({**data, "machines": 1, "device": name}, "devices.yaml", name)
        entries[name] = CatalogueEntry(machine, detect, tuple(sources.items()))
    return MappingProxyType(entries)


def find_device(name: str) -> CatalogueEntry:
    """The entry of a device, upper or lower case. Raises ClusterError with close matches and all names."""
    for known, entry in catalogue().items():
        if known.casefold() == name.strip().casefold():
            return entry
    raise ClusterError(f"unknown device {name!r}; {suggest(name, catalogue())}")


def recognise(product: str) -> CatalogueEntry | None:
    """The entry for a name that CUDA or Paddle gives a device (``NVIDIA A100-SXM4-80GB``); None when no entry fits.

    A slice of a device (MIG) is another device and fits none.
    """
    if re.search(r"\bMIG\b", product):
        return None
    for entry in catalogue().values():
        if re.search(entry.detect, product, re.IGNORECASE):
            return entry
    return None
