"""Finds the plugins that are installed and loads them one by one, so that none can take down another or the tuner.

A plugin is an entry point of group ``paddle_rbt``. Whatever goes wrong with one, at import or later, is recorded with its
distribution, and the plugin is left out.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

import pluggy

from paddle_rbt_plugin.errors import PatternError, describe_error
from paddle_rbt_plugin.pattern import CompiledPattern, compile_pattern
from paddle_rbt_plugin.plugins import markers

BLOCK_VARIABLE = "PADDLE_RBT_BLOCK"
_OWN = "paddle-rbt-plugin"

State = Literal["active", "broken", "blocked"]


class PluginWarning(UserWarning):
    """A plugin that is left out, or a blocked name that nothing has."""


@dataclass(frozen=True)
class PluginRow:
    """One line of ``paddle-rbt patterns``: a pattern, or an entry point that gave none."""

    name: str
    distribution: str
    version: str
    entry_point: str
    """As in the package's setup.py: ``qkv = paddle_rbt_patterns.qkv``."""
    state: State
    reason: str = ""
    """Why it is not active; empty where it is."""


@dataclass(frozen=True)
class Plugins:
    """What ``load_plugins`` found."""

    patterns: tuple[CompiledPattern, ...]
    """The active patterns, this package's own first."""
    rows: tuple[PluginRow, ...]

    def pattern(self, name: str) -> CompiledPattern:
        """The active pattern of that name. Raises PatternError, with the reason, for one that is broken or blocked, and
        with the nearest name for one that does not exist."""
        for pattern in self.patterns:
            if pattern.name == name:
                return pattern
        for row in self.rows:
            if row.name == name:
                source = f"{row.distribution} {row.version}, entry point {row.entry_point!r}"
                raise PatternError(f"pattern {name!r} ({source}) is {row.state}: {row.reason}")
        raise PatternError(f"no plugin gives a pattern named {name!r}{_suggest(name, [p.name for p in self.patterns])}")


def load_plugins(blocked: Iterable[str] = ()) -> Plugins:
    """Loads every installed plugin but those ``blocked``, which may name patterns, entry points or distributions; the
    environment variable ``PADDLE_RBT_BLOCK=name,name`` adds to them.

    Broken plugins are warned about (PluginWarning), listed in ``rows`` and left out. The result does not depend on the order
    in which packages are installed or found. Raises PatternError for a name in ``blocked`` that nothing has; in the
    environment variable, which may serve several jobs, such a name is only warned about.
    """
    by_argument = [blocked] if isinstance(blocked, str) else list(blocked)
    by_variable = [name.strip() for name in os.environ.get(BLOCK_VARIABLE, "").split(",") if name.strip()]
    reasons = dict.fromkeys(by_variable, f"blocked by {BLOCK_VARIABLE}") | dict.fromkeys(by_argument, "blocked by name")
    loader = _Loader(reasons)
    for point in sorted(set(entry_points(group=markers.PROJECT)), key=_order):
        loader.load(point)
    loader.check_names(by_argument, by_variable)
    for row in loader.rows:
        if row.state == "broken":
            message = f"plugin {row.name!r} of {row.distribution} {row.version} is left out: {row.reason} ({row.entry_point})"
            warnings.warn(message, PluginWarning, stacklevel=2)
    return Plugins(tuple(loader.patterns.values()), tuple(loader.rows))


class _Loader:
    """What has been loaded so far."""

    def __init__(self, blocked: dict[str, str]):
        self.blocked = {_normal(name): reason for name, reason in blocked.items()}
        self.patterns: dict[str, CompiledPattern] = {}
        self.rows: list[PluginRow] = []
        self.names: set[str] = set()  # everything that could have been blocked
        self.unread = False  # a blocked plugin is not imported, so the names of its patterns stay unknown

    def load(self, point: EntryPoint) -> None:
        distribution = _source(point)[0]
        self.names |= {point.name, distribution}
        reason = self.blocked.get(_normal(point.name)) or self.blocked.get(_normal(distribution))
        if reason:
            self.unread = True
            self.rows.append(_row(point.name, point, "blocked", reason))
            return
        try:
            classes = _registered(point)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: a plugin must not end the job
            self.rows.append(_row(point.name, point, "broken", describe_error(error)))
            return
        for cls in classes:
            self._add(cls, point)

    def _add(self, cls: Any, point: EntryPoint) -> None:
        distribution, version = _source(point)
        name = getattr(cls, "name", None)
        name = name if isinstance(name, str) and name else point.name
        self.names.add(name)
        if _normal(name) in self.blocked:
            self.rows.append(_row(name, point, "blocked", self.blocked[_normal(name)]))
            return
        try:
            pattern = compile_pattern(cls, distribution, version)
            if name in self.patterns:
                raise PatternError(f"the name {name!r} is already taken by a pattern of {self.patterns[name].distribution}")
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.rows.append(_row(name, point, "broken", describe_error(error)))
            return
        self.patterns[name] = pattern
        self.rows.append(_row(name, point, "active"))

    def check_names(self, by_argument: list[str], by_variable: list[str]) -> None:
        known = {_normal(name) for name in self.names}
        for name in dict.fromkeys(by_argument + by_variable):
            if _normal(name) in known:
                continue
            message = f"cannot block {name!r}: no pattern, entry point or distribution is so named{_suggest(name, self.names)}"
            if name in by_argument and not self.unread:
                raise PatternError(message)
            warnings.warn(message, PluginWarning, stacklevel=3)


def _registered(point: EntryPoint) -> list[Any]:
    """What the plugin behind an entry point registers. A manager of its own keeps it apart from all others."""
    manager = pluggy.PluginManager(markers.PROJECT)
    manager.add_hookspecs(markers)
    plugin = point.load()
    manager.register(plugin, point.name)
    manager.check_pending()
    if not manager.get_hookcallers(plugin):
        raise PatternError(f"{point.value} implements no hook: mark register_patterns(register) with @hookimpl")
    classes: list[Any] = []
    manager.hook.register_patterns(register=classes.append)
    return classes


def _source(point: EntryPoint) -> tuple[str, str]:
    """Name and version of the distribution."""
    return ("unknown", "") if point.dist is None else (point.dist.name or "unknown", point.dist.version or "")


def _row(name: str, point: EntryPoint, state: State, reason: str = "") -> PluginRow:
    return PluginRow(name, *_source(point), f"{point.name} = {point.value}", state, reason)


def _order(point: EntryPoint) -> tuple[bool, str, str, str]:
    """This package first, so that no other can take a built-in pattern's name."""
    distribution = _normal(_source(point)[0])
    return distribution != _OWN, distribution, point.name, point.value


def _normal(name: str) -> str:
    """Distribution names are equal up to case and the characters ``-_.``; so are all names here."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _suggest(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, sorted(known), 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known)) or 'none'}"
