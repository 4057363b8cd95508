"""Finds the plugins that are installed and loads them one by one, so that none can take down another or the tuner.

A plugin is an entry point of group ``paddle_rbt``. Whatever goes wrong with one, at import or later, is recorded with its
distribution, and the plugin is left out.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Any, Literal

import pluggy

from paddle_rbt_plugin.cluster import CatalogueEntry
from paddle_rbt_plugin.cost.model import PluginCostModel
from paddle_rbt_plugin.errors import CostModelError, PatternError, TunerError, describe_error
from paddle_rbt_plugin.graph.names import CanonicalName
from paddle_rbt_plugin.pattern import CompiledPattern
from paddle_rbt_plugin.plugins import markers
from paddle_rbt_plugin.plugins.kinds import HOOKS, Kind, Origin, name_of

BLOCK_VARIABLE = "PADDLE_RBT_BLOCK"
_OWN = "paddle-rbt-plugin"
_BUILT_IN = EntryPoint("builtin", "paddle_rbt_plugin.plugins.builtin", markers.PROJECT)

State = Literal["active", "broken", "blocked"]


class PluginWarning(UserWarning):
    """A plugin that is left out, or a blocked name that nothing has."""


@dataclass(frozen=True)
class PluginRow:
    """One line of ``paddle-rbt patterns``: something that is registered, or an entry point that gave nothing."""

    name: str
    distribution: str
    version: str
    entry_point: str
    """As in the package's setup.py: ``qkv = paddle_rbt_patterns.qkv``."""
    state: State
    reason: str = ""
    """Why it is not active; empty where it is."""
    kind: Kind | Literal["plugin"] = "pattern"
    """What is registered; ``plugin`` for an entry point as a whole."""


@dataclass(frozen=True)
class Plugins:
    """What ``load_plugins`` found."""

    patterns: tuple[CompiledPattern, ...]
    """The active patterns, this package's own first."""
    devices: Mapping[str, CatalogueEntry]
    """Devices beyond the catalogue, by name."""
    cost_models: Mapping[str, PluginCostModel]
    op_names: Mapping[str, CanonicalName]
    """What custom ops are read as, by their type."""
    rows: tuple[PluginRow, ...]

    def pattern(self, name: str) -> CompiledPattern:
        """The active pattern of that name. Raises PatternError, with the reason, for one that is broken or blocked, and
        with the nearest name for one that does not exist."""
        return self._find(name, {p.name: p for p in self.patterns}, "pattern", PatternError)

    def cost_model(self, name: str) -> PluginCostModel:
        """The active cost model of that name. Raises CostModelError as ``pattern`` does."""
        return self._find(name, self.cost_models, "cost_model", CostModelError)

    def _find(self, name: str, active: Mapping[str, Any], kind: Kind, error: type[TunerError]) -> Any:
        if name in active:
            return active[name]
        word = _word(kind)
        for row in self.rows:
            if row.name == name and row.kind in (kind, "plugin"):
                source = f"{row.distribution} {row.version}, entry point {row.entry_point!r}"
                raise error(f"{word} {name!r} ({source}) is {row.state}: {row.reason}")
        raise error(f"no plugin gives a {word} named {name!r}{_suggest(name, active)}")


def load_plugins(blocked: Iterable[str] = ()) -> Plugins:
    """Loads every installed plugin but those ``blocked``, which may name entry points, distributions, and whatever is
    registered (patterns, devices, ...); the environment variable ``PADDLE_RBT_BLOCK=name,name`` adds to them.

    Broken plugins are warned about (PluginWarning), listed in ``rows`` and left out. The result does not depend on the order
    in which packages are installed or found. Raises PatternError for a name in ``blocked`` that nothing has; in the
    environment variable, which may serve several jobs, such a name is only warned about.
    """
    by_argument = [blocked] if isinstance(blocked, str) else list(blocked)
    by_variable = [name.strip() for name in os.environ.get(BLOCK_VARIABLE, "").split(",") if name.strip()]
    reasons = dict.fromkeys(by_variable, f"blocked by {BLOCK_VARIABLE}") | dict.fromkeys(by_argument, "blocked by name")
    loader = _Loader(reasons)
    loader.register_all(_BUILT_IN, _built_in_origin())
    found = _with_origins(set(entry_points(group=markers.PROJECT)))
    for point, origin in sorted(found, key=lambda pair: _order(*pair)):
        loader.load(point, origin)
    loader.check_names(by_argument, by_variable)
    for row in loader.rows:
        if row.state == "broken":
            message = f"plugin {row.name!r} of {row.distribution} {row.version} is left out: {row.reason} ({row.entry_point})"
            warnings.warn(message, PluginWarning, stacklevel=2)
    return loader.plugins()


class _Loader:
    """What has been loaded so far."""

    def __init__(self, blocked: dict[str, str]):
        self.blocked = {_normal(name): reason for name, reason in blocked.items()}
        self.found: dict[Kind, dict[str, Any]] = {kind: {} for kind in HOOKS}
        self.givers: dict[tuple[Kind, str], Origin] = {}  # who has each name; names but those of ops are equal up to case
        self.rows: list[PluginRow] = []
        self.manager = _hook_manager()
        self.names: set[str] = set()  # everything that could have been blocked
        self.unread = False  # a blocked plugin is not imported, so the names of its patterns stay unknown

    def plugins(self) -> Plugins:
        found = self.found
        patterns = tuple(found["pattern"].values())
        return Plugins(patterns, found["device"], found["cost_model"], found["op_name"], tuple(self.rows))

    def load(self, point: EntryPoint, origin: Origin) -> None:
        self.names |= {point.name, origin.distribution}
        reason = self.blocked.get(_normal(point.name)) or self.blocked.get(_normal(origin.distribution))
        if reason:
            self.unread = True
            self._row(point.name, origin, "plugin", "blocked", reason)
            return
        self.register_all(point, origin)

    def register_all(self, point: EntryPoint, origin: Origin) -> None:
        try:
            registered = _registered(point, self.manager)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: a plugin must not end the job
            self._row(point.name, origin, "plugin", "broken", describe_error(error))
            return
        for kind, args, attrs in registered:
            self._add(kind, args, attrs, name_of(args) or point.name, origin)

    def _add(self, kind: Kind, args: tuple[Any, ...], attrs: dict[str, Any], name: str, origin: Origin) -> None:
        self.names.add(name)
        if _normal(name) in self.blocked:
            self._row(name, origin, kind, "blocked", self.blocked[_normal(name)])
            return
        try:
            made = HOOKS[kind][1](origin, *args, **attrs)
            key = kind, name if kind == "op_name" else name.casefold()  # Paddle tells ops apart by case
            giver = self.givers.get(key)
            if giver is not None:
                raise PatternError(f"the name {name!r} is already taken by a {_word(kind)} of {giver.distribution}")
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._row(name, origin, kind, "broken", describe_error(error))
            return
        self.givers[key] = origin
        self.found[kind][name] = made
        self._row(name, origin, kind, "active")

    def _row(self, name: str, origin: Origin, kind: Any, state: State, reason: str = "") -> None:
        self.rows.append(PluginRow(name, origin.distribution, origin.version, origin.entry_point, state, reason, kind))

    def check_names(self, by_argument: list[str], by_variable: list[str]) -> None:
        known = {_normal(name) for name in self.names}
        for name in dict.fromkeys(by_argument + by_variable):
            if _normal(name) in known:
                continue
            hint = _suggest(name, self.names)
            message = f"cannot block {name!r}: no plugin, nothing registered and no distribution is so named{hint}"
            if name in by_argument and not self.unread:
                raise PatternError(message)
            warnings.warn(message, PluginWarning, stacklevel=3)


def _hook_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(markers.PROJECT)
    manager.add_hookspecs(markers)
    return manager


def _registered(point: EntryPoint, manager: pluggy.PluginManager) -> list[tuple[Kind, tuple[Any, ...], dict[str, Any]]]:
    """What the plugin behind an entry point registers: the arguments of each call of ``register``. It is alone in ``manager``
    meanwhile."""
    plugin = point.load()
    found: list[tuple[Kind, tuple[Any, ...], dict[str, Any]]] = []

    def recorder(kind: Kind) -> Callable[..., None]:
        return lambda *args, **attrs: found.append((kind, args, attrs))

    try:
        manager.register(plugin, point.name)
        manager.check_pending()
        if not manager.get_hookcallers(plugin):
            raise PatternError(f"{point.value} implements no hook: mark register_patterns(register) with @hookimpl")
        for kind, (hook, _) in HOOKS.items():
            getattr(manager.hook, hook)(register=recorder(kind))
    finally:
        if manager.is_registered(plugin):
            manager.unregister(plugin)
    return found


def _with_origins(points: Iterable[EntryPoint]) -> list[tuple[EntryPoint, Origin]]:
    """Each entry point and where it is from. Metadata is parsed at each look, so here once for all points of a distribution."""
    named: dict[Any, tuple[str, str]] = {None: ("unknown", "")}
    found = []
    for point in points:
        dist = point.dist
        if dist is not None and dist not in named:
            metadata = dist.metadata
            named[dist] = metadata["Name"] or "unknown", metadata["Version"] or ""
        found.append((point, Origin(*named[dist], _source(point))))
    return found


def _built_in_origin() -> Origin:
    try:
        return Origin(_OWN, version(_OWN), _source(_BUILT_IN))
    except PackageNotFoundError:  # imported from a directory that is no installation
        return Origin(_OWN, "", _source(_BUILT_IN))


def _source(point: EntryPoint) -> str:
    return f"{point.name} = {point.value}"


def _word(kind: Kind) -> str:
    return kind.replace("_", " ")


def _order(point: EntryPoint, origin: Origin) -> tuple[bool, str, str, str]:
    """This package first, so that no other can take a built-in pattern's name."""
    distribution = _normal(origin.distribution)
    return distribution != _OWN, distribution, point.name, point.value


def _normal(name: str) -> str:
    """Distribution names are equal up to case and the characters ``-_.``; so are all names here."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _suggest(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, sorted(known), 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known)) or 'none'}"
