"""The devices known by name, from ``devices.yaml``: figures of data sheets, each with its source."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

import yaml

from ..errors import ClusterError
from ..validation import suggest
from .cluster import MachineGroup
from .fields import Fields

_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class CatalogueEntry:
    """A device in its usual machine.

    ``machine`` is one such machine; ``detect`` matches the names that CUDA and Paddle give the device; ``sources`` says for
    each section of ``devices.yaml`` where its figures are from.
    """

    machine: MachineGroup
    detect: str
    """Empty for a device that is only ever named."""
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
    devices = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # libyaml, where it is there, is faster
    entries = {name: catalogue_entry(name, data, "devices.yaml") for name, data in devices.items()}
    return MappingProxyType(entries)


MoreDevices = Callable[[], Mapping[str, CatalogueEntry]]
"""Where to look for a device that the catalogue lacks; asked only then."""


def catalogue_entry(name: Any, profile: Any, source: str) -> CatalogueEntry:
    """The entry that a section of ``devices.yaml`` describes, ``detect`` and ``sources`` being optional.

    Raises ClusterError, which names ``source`` and the key, for a name or a figure that cannot be one."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ClusterError(f"{source}: a device needs a name of letters, digits, '_', '-' and '.', not {name!r}")
    fields = Fields.of(profile, source, name)
    data: dict[str, Any] = dict(fields.data)
    detect, sources = data.pop("detect", ""), data.pop("sources", {})
    try:
        re.compile(detect)
    except (TypeError, re.error) as error:
        raise fields.error("detect", f"expected a regular expression, not {detect!r}: {error}") from None
    if not isinstance(sources, Mapping):
        raise fields.error("sources", f"expected a text per section, not {sources!r}")
    machine = MachineGroup.from_dict({**data, "machines": 1, "device": name}, source, name)
    return CatalogueEntry(machine, detect, tuple(sources.items()))


def device_names(more: MoreDevices = dict) -> tuple[str, ...]:
    """The names of all devices there are."""
    return (*catalogue(), *more())


def find_device(name: str, more: MoreDevices = dict) -> CatalogueEntry:
    """The entry of a device, upper or lower case. Raises ClusterError with close matches and all names."""
    wanted = name.strip().casefold()
    for devices in (catalogue, more):
        for known, entry in devices().items():
            if known.casefold() == wanted:
                return entry
    raise ClusterError(f"unknown device {name!r}; {suggest(name, device_names(more))}")


def recognise(product: str, more: MoreDevices = dict) -> CatalogueEntry | None:
    """The entry for a name that CUDA or Paddle gives a device (``NVIDIA A100-SXM4-80GB``); None when no entry fits.

    A slice of a device (MIG) is another device and fits none.
    """
    if re.search(r"\bMIG\b", product):
        return None
    for devices in (catalogue, more):
        for entry in devices().values():
            if entry.detect and re.search(entry.detect, product, re.IGNORECASE):
                return entry
    return None
