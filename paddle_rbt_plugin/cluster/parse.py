"""From what a user writes to a Cluster: the short form, a file, a dict, or Paddle's own description."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from ..errors import ClusterError
from ..validation import suggest
from .catalogue import MoreDevices, device_names, find_device
from .cluster import GROUP_KEYS, OPTIONAL_KEYS, Cluster, MachineGroup, merged
from .fields import MAX_COUNT, Fields
from .paddle_format import describe_paddle_cluster, is_paddle_cluster, read_paddle_machines
from .strict import load_json, load_yaml

EXAMPLE = "4x8:A100-80G, or 2x8:A100-80G+2x8:V100-32G for two kinds of machines"
_SHORT_FORM = re.compile(r"\s*([+-]?[0-9]+)\s*[xX]\s*([+-]?[0-9]+)\s*:(.*)", re.DOTALL)
_SUFFIXES = (".yaml", ".yml", ".json")


def parse_cluster(value: object, more: MoreDevices = dict) -> Cluster:
    """Reads a cluster description.

    ``value`` is the short form ``NODESxDEVICES:GPU``, groups joined by ``+``; the path of a YAML or JSON file; a dict with
    the same content as such a file; Paddle's cluster JSON or ``Cluster`` object; or a Cluster, which is returned as it is.
    ``more`` knows devices that the catalogue lacks.
    Raises ClusterError that says what is wrong, where, and what would be right.
    """
    if isinstance(value, Cluster):
        return value
    if isinstance(value, os.PathLike):
        return _parse_file(os.fspath(value), more)
    if isinstance(value, str):
        return _parse_file(value, more) if _is_path(value) else Cluster(_parse_short_form(value, "", more))
    if isinstance(value, Mapping):
        return _parse_content(value, "cluster", more)
    if is_paddle_cluster(value):
        return Cluster(read_paddle_machines(describe_paddle_cluster(value), "Paddle's cluster", more))
    raise ClusterError(
        f"cannot read a cluster from {type(value).__name__}; give a short form such as {EXAMPLE}, a file or a dict"
    )


def _is_path(text: str) -> bool:
    return text.strip().lower().endswith(_SUFFIXES) or "/" in text or os.sep in text or os.path.isfile(text)


def _parse_short_form(text: str, where: str, more: MoreDevices) -> tuple[MachineGroup, ...]:
    return tuple(_parse_short_group(part, text, where, more) for part in text.split("+"))


def _parse_short_group(part: str, whole: str, where: str, more: MoreDevices) -> MachineGroup:
    parsed = _SHORT_FORM.fullmatch(part)
    if not parsed or not parsed[3].strip():
        within = f" in {_clip(whole)}" if part != whole else ""
        raise ClusterError(f"{where}cannot read {_clip(part)}{within}; write NODESxDEVICES:GPU, e.g. {EXAMPLE}")
    for what, count in (("machines", parsed[1]), ("devices per machine", parsed[2])):
        if len(count) > 9 or not 1 <= int(count) <= MAX_COUNT:
            raise ClusterError(f"{where}{_clip(part)}: the number of {what} must be from 1 to {MAX_COUNT}, not {count[:20]}")
    try:
        entry = find_device(parsed[3], more)
    except ClusterError as error:
        raise ClusterError(f"{where}{_clip(part)}: {error}") from None
    return entry.group(int(parsed[1]), int(parsed[2]))


def _clip(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _parse_file(path: str, more: MoreDevices) -> Cluster:
    path = path.strip() if not os.path.exists(path) else path
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ClusterError(f"{path!r}: no such file; give a file that exists or a short form such as {EXAMPLE}") from None
    except (OSError, ValueError) as error:
        raise ClusterError(f"{path!r}: cannot read the file: {error}") from error
    kind = "JSON" if path.lower().endswith(".json") and text.strip() else "YAML"
    try:
        # YAML does not take all JSON: it refuses tabs.
        content = load_json(text) if kind == "JSON" else load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ClusterError(f"{path}: not valid {kind}: {error}") from error
    content = _unsplit(content)
    if content is None:
        raise ClusterError(f"{path}: the file is empty; write e.g. 'groups: [4x8:A100-80G]'")
    if isinstance(content, str):
        return Cluster(_parse_short_form(content, f"{path}: ", more))
    return _parse_content(content, path, more)


def _parse_content(content: object, source: str, more: MoreDevices) -> Cluster:
    if isinstance(content, Mapping) and "machines" in content and isinstance(content["machines"], list | tuple):
        return Cluster(read_paddle_machines(content, source, more))
    if isinstance(content, Mapping) and "groups" not in content and "device" in content:
        return Cluster((_parse_group(content, source, "", more),))
    fields = Fields.of(content, source, known=("groups", *GROUP_KEYS, *OPTIONAL_KEYS))
    if "groups" not in fields.data:
        raise fields.error(
            "", "neither groups nor a device; write e.g. {machines: 4, devices_per_machine: 8, device: A100-80G}"
        )
    for key in fields.data:
        if key != "groups":
            raise fields.error("", f"{key} is given beside groups; move it into the group that it belongs to")
    items = fields.data["groups"]
    if not isinstance(items, list | tuple) or not items:
        raise fields.error(
            "groups", "expected a list of groups, each a short form or {machines, devices_per_machine, device, ...}"
        )
    groups: list[MachineGroup] = []
    for i, item in enumerate(map(_unsplit, items)):
        path = f"groups[{i}]"
        if isinstance(item, str):
            groups.extend(_parse_short_form(item, f"{source}: {path}: ", more))
        else:
            groups.append(_parse_group(item, source, path, more))
    return Cluster(tuple(groups))


def _parse_group(content: object, source: str, path: str, more: MoreDevices) -> MachineGroup:
    """A group whose missing figures come from the catalogue; a device of one's own states all of them."""
    fields = Fields.of(content, source, path, (*GROUP_KEYS, *OPTIONAL_KEYS))
    name = fields.text("device")
    own = [key for key in GROUP_KEYS[3:] if key not in fields.data]
    try:
        entry = find_device(name, more)
    except ClusterError:
        if own:
            raise fields.error(
                "device",
                f"unknown device {name!r}; {suggest(name, device_names(more))}; for a device of your own add {', '.join(own)}",
            ) from None
        return MachineGroup.from_dict(fields.data, source, path)
    usual = entry.group(fields.count("machines"), fields.count("devices_per_machine")).to_dict()
    return MachineGroup.from_dict(merged(usual, {**fields.data, "device": usual["device"]}), source, path)


def _unsplit(content: object) -> object:
    """The short form that YAML took for a mapping: unquoted, ``4x8: A100-80G`` is one key and its value."""
    if isinstance(content, Mapping) and len(content) == 1:
        ((key, value),) = content.items()
        if isinstance(value, str) and _SHORT_FORM.fullmatch(f"{key}:{value}"):
            return f"{key}:{value}"
    return content
