"""Changes to Paddle at run time, as objects: what each changes, why, and for which versions.

A change is a function that yields settings, decorated with ``paddle_change``; its docstring says what it does and, after
``Reason:``, why. All of them are listed in ``paddle_changes``. No other module sets attributes of Paddle's modules and classes,
nor Paddle's flags (``tests/test_house.py``), and each change is shown to be needed (``tests/test_paddle_changes.py``).

``apply`` is a scope. ``install`` is permanent, for changes that no scope can cover; such a change states the reason
(``permanent``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import paddle
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ENGINES_OF_SCRIPTS = "scripts call the methods of engines that they have created with Paddle"
"""Why the hooks into ``auto.Engine`` and ``dist.to_static`` are permanent: no code of this package runs before these calls."""
SHARDED_MODELS = "the script decides when a sharded model runs, and when its gradients and updates are computed"
"""Why the changes for dygraph are permanent, from the first ``plan.shard_layer`` on."""
_ABSENT = object()
_DEVELOP, _NEWEST = Version("0.0.0"), Version("3.3.1")


class Setting(Protocol):
    """One thing that a change sets."""

    def set(self) -> Callable[[], None]:
        """Makes the setting, and returns a function that restores the previous state."""
        ...

    def current(self) -> Setting:
        """The setting of what is there now."""
        ...


@dataclass(frozen=True)
class Attribute:
    """An attribute of a module, a class or an object."""

    owner: Any
    name: str
    value: Any

    def set(self) -> Callable[[], None]:
        before = type(self.owner) if self.name == "__class__" else vars(self.owner).get(self.name, _ABSENT)
        setattr(self.owner, self.name, self.value)
        if before is _ABSENT:  # inherited, or not there at all
            return lambda: delattr(self.owner, self.name)
        return lambda: setattr(self.owner, self.name, before)

    def current(self) -> Setting:
        return replace(self, value=type(self.owner) if self.name == "__class__" else vars(self.owner)[self.name])


@dataclass(frozen=True)
class Item:
    """An entry of a table."""

    table: MutableMapping[Any, Any]
    key: Any
    value: Any

    def set(self) -> Callable[[], None]:
        before = self.table.get(self.key, _ABSENT)
        self.table[self.key] = self.value
        if before is _ABSENT:
            return lambda: self.table.pop(self.key, None)
        return lambda: self.table.__setitem__(self.key, before)

    def current(self) -> Setting:
        return self


@dataclass(frozen=True)
class Listed:
    """An entry at the end of a list."""

    entries: list[Any]
    value: Any

    def set(self) -> Callable[[], None]:
        self.entries.append(self.value)
        return lambda: self.entries.remove(self.value)

    def current(self) -> Setting:
        return self


@dataclass(frozen=True)
class Flag:
    """A flag of Paddle's C++ part."""

    name: str
    value: Any

    def set(self) -> Callable[[], None]:
        before = paddle.get_flags(self.name)
        paddle.set_flags({self.name: self.value})
        return lambda: paddle.set_flags(before)

    def current(self) -> Setting:
        return self


def installed_version() -> Version:
    """The version of Paddle; a build of its development branch counts as the newest one that is supported."""
    version = Version(paddle.__version__)
    return _NEWEST if version == _DEVELOP else version


class PaddleChange:
    """A change to Paddle. A change without arguments is made only once, however deeply its scopes nest."""

    def __init__(
        self, settings: Callable[..., Iterable[Setting]], versions: str, lacking: Callable[[], bool], permanent: str | None
    ):
        self.name = settings.__name__
        self.__name__, self.__doc__, self.__module__ = self.name, settings.__doc__, settings.__module__
        self.reason = " ".join((settings.__doc__ or "").partition("Reason:")[2].split())
        self.versions = SpecifierSet(versions, prereleases=True)
        self.permanent = permanent
        """Why a scope is not enough; None if it is."""
        self._settings, self._lacking = settings, lacking
        self.takes_arguments = bool(inspect.signature(settings).parameters)
        self._made: list[Setting] = []
        self._undo: list[Callable[[], None]] = []
        self._left_out = False

    def __repr__(self) -> str:
        return f"PaddleChange({self.name})"

    @property
    def is_made(self) -> bool:
        """Whether the change is in effect."""
        return bool(self._made)

    def is_needed(self) -> bool:
        """Whether the installed Paddle, in this process and on its devices, needs the change."""
        return installed_version() in self.versions and self._lacking()

    @contextmanager
    def apply(self, *args: Any) -> Iterator[None]:
        """Makes the change within the scope, if it is needed and not made yet; ``args`` are passed to its function."""
        if not self._is_to_be_made():
            yield
            return
        made, undo = len(self._made), len(self._undo)
        try:
            self._make(args)
            yield
        finally:
            for put_back in reversed(self._undo[undo:]):
                put_back()
            del self._made[made:], self._undo[undo:]

    def install(self, *args: Any) -> None:
        """Makes the change for the rest of the process, if it is needed and not made yet."""
        if self.permanent is None:
            raise ValueError(f"{self.name} is a scope, and does not say why it should stay")
        if self._is_to_be_made():
            self._make(args)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Paddle without the change: within the scope it is undone and not made again; afterwards it is restored."""
        before, self._left_out = self._left_out, True
        made = [setting.current() for setting in self._made]
        for put_back in reversed(self._undo):
            put_back()
        try:
            yield
        finally:
            self._left_out = before
            self._undo[:] = [setting.set() for setting in made]

    def _is_to_be_made(self) -> bool:
        return not self._left_out and (self.takes_arguments or not self._made) and self.is_needed()

    def _make(self, args: tuple[Any, ...]) -> None:
        for setting in self._settings(*args):
            self._undo.append(setting.set())
            self._made.append(setting)


def paddle_change(
    versions: str = ">=3.0,<3.4", *, lacking: Callable[[], bool] = lambda: True, permanent: str | None = None
) -> Callable[[Callable[..., Iterable[Setting]]], PaddleChange]:
    """Turns a function that yields settings into a change. ``versions`` are the versions of Paddle that it is for, ``lacking``
    tells whether this process needs it, and ``permanent`` says why it is installed instead of applied within a scope."""
    return lambda settings: PaddleChange(settings, versions, lacking, permanent)


def on_cpu() -> bool:
    """Whether the installed Paddle is a CPU build."""
    return not paddle.is_compiled_with_cuda()
