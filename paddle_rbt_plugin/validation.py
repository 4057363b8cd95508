"""Checks user input in one way everywhere: pydantic checks a value against a kind, and the message says where the value is and
what would be right: ``PLACE NAME must be WORDS, not VALUE``.

A dataclass gives the ``Kind`` of each field in its annotation, such as ``Annotated[int, whole(1, 1024)]``.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from paddle_rbt_plugin.errors import TunerError

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


@dataclass(frozen=True, eq=False)
class Kind:
    """The legal values: in words that follow "must be", and as a type that pydantic checks."""

    words: str
    type: Any

    def or_none(self) -> Kind:
        """The same kind with None allowed."""
        return Kind(self.words, self.type | None)

    @cached_property
    def adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.type)


def one_of(*options: str) -> Kind:
    """The kind of one of a few names."""
    return Kind(f"one of {', '.join(options)}", Literal[options])


def whole(least: int = 1, most: int | None = None) -> Kind:
    """The kind of a whole number in a range; booleans are rejected."""
    words = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    return Kind(words, Annotated[int, Field(strict=True, ge=least, le=most)])


def number(words: str, *, finite: bool = True, **bounds: Any) -> Kind:
    """The kind of a number within pydantic's ``gt``, ``ge``, ``lt`` and ``le``; no bound accepts NaN."""
    return Kind(f"a number {words}", Annotated[float, Field(strict=True, allow_inf_nan=not finite, **bounds)])


def kinds_of(owner: type) -> Mapping[str, Kind]:
    """The kinds of a dataclass's fields, in order; a field without one takes any value."""
    hints = _hints(owner)
    found = {f.name: getattr(hints[f.name], "__metadata__", ()) for f in fields(owner)}
    return {name: kind for name, metadata in found.items() for kind in metadata if isinstance(kind, Kind)}


def check(kind: Kind, name: str, value: Any, error: type[TunerError] = TunerError, place: str = "") -> Any:
    """``value`` converted to ``kind``; raises ``error`` if that is not possible."""
    try:
        return kind.adapter.validate_python(value)
    except ValidationError:
        raise error(f"{place}{name} must be {kind.words}, not {shown(value)}") from None


def check_fields(instance: Any, error: type[TunerError] = TunerError) -> None:
    """Checks every field of a frozen dataclass, for its ``__post_init__``; raises ``error`` for the first that is wrong."""
    for name, kind in kinds_of(type(instance)).items():
        object.__setattr__(instance, name, check(kind, name, getattr(instance, name), error))


def check_known(
    what: str,
    words: Collection[Any],
    known: Collection[str],
    error: type[TunerError] = TunerError,
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Raises ``error`` for the first of ``words`` that is not known. ``aliases`` maps names used elsewhere to known ones."""
    for word in words:
        if word not in known:
            raise error(f"{what} {shown(word)}; {nearest((aliases or {}).get(str(word), str(word)), known)}")


def nearest(word: str, known: Collection[str]) -> str:
    """``did you mean ...?`` with the names closest to ``word``, or all known names if none is close."""
    close = _closest(word, known)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"


def suggest(word: str, known: Collection[str]) -> str:
    """Like ``nearest``, but always with all known names."""
    close = _closest(word, known)
    return f"{nearest(word, known)} known: {', '.join(known)}" if close else nearest(word, known)


def _closest(word: str, known: Collection[str]) -> list[str]:
    folded = word.strip().casefold()[:64]
    by_folded = {k.casefold(): k for k in known}
    if folded in by_folded:
        return [by_folded[folded]]
    begins = [k for k in by_folded if folded and k.startswith(folded)]
    return [by_folded[k] for k in begins or difflib.get_close_matches(folded, by_folded, n=3)]


def shown(value: Any) -> str:
    """The value for a message: abbreviated, even if a file's aliases make it large."""
    return "nothing" if value is None else _SHORT.repr(value)


@cache
def _hints(owner: type) -> dict[str, Any]:
    return get_type_hints(owner, include_extras=True)
