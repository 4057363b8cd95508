"""What plugins can register: one kind per hook, each with the check that everything registered passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from paddle_rbt_plugin.cluster import CatalogueEntry, catalogue, catalogue_entry
from paddle_rbt_plugin.cost.model import PluginCostModel, check_cost_model
from paddle_rbt_plugin.errors import PatternError
from paddle_rbt_plugin.graph.names import CanonicalName, canonical_name
from paddle_rbt_plugin.pattern import CompiledPattern, compile_pattern

Kind = Literal["pattern", "device", "cost_model", "op_name"]


@dataclass(frozen=True)
class Origin:
    """Where a plugin comes from."""

    distribution: str
    version: str
    entry_point: str
    """As in the package's setup.py: ``qkv = paddle_rbt_patterns.qkv``."""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}, entry point {self.entry_point!r}"


def _pattern(origin: Origin, cls: Any) -> CompiledPattern:
    return compile_pattern(cls, origin.distribution, origin.version, origin.entry_point)


def _device(origin: Origin, name: Any, profile: Any) -> CatalogueEntry:
    entry = catalogue_entry(name, profile, f"device {name!r}")
    if name.casefold() in map(str.casefold, catalogue()):
        raise PatternError(f"the name {name!r} is already taken by a device of the catalogue")
    return entry


def _cost_model(origin: Origin, cls: Any) -> PluginCostModel:
    return PluginCostModel(check_cost_model(cls), origin.distribution, origin.version, origin.entry_point)


def _op_name(origin: Origin, name: Any, canonical: Any, **attrs: Any) -> CanonicalName:
    return canonical_name(name, canonical, attrs)


HOOKS: dict[Kind, tuple[str, Callable[..., Any]]] = {
    "pattern": ("register_patterns", _pattern),
    "device": ("register_devices", _device),
    "cost_model": ("register_cost_models", _cost_model),
    "op_name": ("register_op_names", _op_name),
}
"""Per kind its hook, and what makes of the arguments of ``register`` what the tuner uses; it raises TunerError."""


def name_of(registered: tuple[Any, ...]) -> str:
    """The name under which something is registered, as far as it can be read from the arguments of ``register``."""
    first = registered[0] if registered else None
    try:
        name = first if isinstance(first, str) else getattr(first, "name", None)
    except (Exception, SystemExit):  # a property of the plugin's own
        return ""
    return name if isinstance(name, str) else ""
