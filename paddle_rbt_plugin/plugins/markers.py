"""The hooks that a plugin may implement, and the markers for them.

How they may change: a hook keeps its name and its meaning. It may get further arguments, which a plugin that does not name
them does not get; a hook that is to go is deprecated for one minor version first, with a warning to whoever implements it. A
hook that this version does not know is reported as an error of the plugin, never ignored; a plugin that also runs with older
versions marks such a hook ``@hookimpl(optionalhook=True)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    from paddle_rbt_plugin.cost import CostModel
    from paddle_rbt_plugin.pattern import Pattern

PROJECT = "paddle_rbt"
"""Namespace of the hooks, and the entry point group in which plugins are found."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class RegisterOpName(Protocol):
    """How an op's canonical name is announced."""

    def __call__(self, name: str, canonical: str, **attrs: Any) -> None: ...


@hookspec
def register_patterns(register: Callable[[type[Pattern]], None]) -> None:
    """Called once when plugins are loaded: announce patterns by calling ``register(PatternClass)`` for each.

    ``register``, of this hook as of the others, never raises. What it is given is checked, and what is malformed is listed as
    broken with what is wrong, while the plugin's other announcements are used. An exception that a hook itself raises leaves
    out the whole plugin.

    :param register: takes a subclass of ``paddle_rbt_plugin.Pattern``.
    """


@hookspec
def register_devices(register: Callable[[str, Mapping[str, Any]], None]) -> None:
    """Called once: announce devices, which users then name in a cluster, ``1x8:NAME``.

    :param register: takes a name and a profile, a dict with the keys of a section of ``cluster/devices.yaml``: a usual
        machine with this device. ``detect``, by which a running job recognises it, and ``sources`` are optional.
    """


@hookspec
def register_cost_models(register: Callable[[type[CostModel]], None]) -> None:
    """Called once: announce cost models, which users then choose by name, ``--cost-model NAME``.

    :param register: takes a subclass of ``paddle_rbt_plugin.CostModel``.
    """


@hookspec
def register_op_names(register: RegisterOpName) -> None:
    """Called once: announce custom ops that compute what an op of Paddle's does, ``register("my_silu", "silu")``.

    Patterns, completion and cost then take one for the other: see ``graph.names``.

    :param register: takes the name of the custom op, the canonical op that it is read as, and as keywords the values of
        attributes that the custom op lacks.
    """
