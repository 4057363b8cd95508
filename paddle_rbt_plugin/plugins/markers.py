"""The hooks that a plugin may implement, and the markers for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from paddle_rbt_plugin.pattern import Pattern

PROJECT = "paddle_rbt"
"""Namespace of the hooks, and the entry point group in which plugins are found."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_patterns(register: Callable[[type[Pattern]], None]) -> None:
    """Called once when plugins are loaded: announce patterns by calling ``register(PatternClass)`` for each.

    ``register`` never raises. It checks the class, and a malformed one is listed as broken with what is wrong, while the
    plugin's other patterns are used. An exception that the hook itself raises leaves out the whole plugin.

    :param register: takes a subclass of ``paddle_rbt_plugin.Pattern``.
    """
