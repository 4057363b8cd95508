"""Reading untrusted mappings, so that every complaint names the place, the value and what would be right.

A quantity is a number in base units (bytes, bytes per second, seconds) or a text with a unit: ``80 GiB``, ``200 Gb/s``,
``14 us``. A number that YAML takes for a text, such as ``1e9``, is a number here.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction

from ..errors import ClusterError

MAX_COUNT = 1 << 20
"""Largest count of machines or of devices per machine that is taken for meant."""

_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

# Fractions, because 3.4 / 10**6 is the float 3.4e-6 and 3.4 * 1e-6 is not.
BYTES = {f"{p}B": Fraction(n) for p, n in (_PREFIXES | _BINARY).items()}
"""Units of memory, in bytes."""
BYTES_PER_SECOND = {
    **{f"{unit}{per}": n for unit, n in BYTES.items() for per in ("/s", "ps")},
    **{f"{p}{bit}": Fraction(n, 8) for p, n in _PREFIXES.items() for bit in ("b/s", "bit/s", "bps")},
}
"""Units of bandwidth, in bytes per second; a small ``b`` is a bit."""
SECONDS = {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6), "ns": Fraction(1, 10**9)}
"""Units of latency, in seconds."""

_QUANTITY = re.compile(r"\s*([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*")


def suggest(word: str, known: Collection[str]) -> str:
    """`` did you mean ...? known: ...`` for a word that is none of the known ones."""
    folded = word.strip().casefold()[:64]
    by_folded = {k.casefold(): k for k in known}
    begins = [k for k in by_folded if folded and k.startswith(folded)]
    close = [by_folded[k] for k in begins or difflib.get_close_matches(folded, by_folded, n=3)]
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}known: {', '.join(known)}"


@dataclass(frozen=True)
class Fields:
    """A mapping and the place it was read from: ``source`` is a file or a word for it, ``path`` the keys that lead here."""

    data: Mapping[str, object]
    source: str
    path: str = ""

    @classmethod
    def of(cls, value: object, source: str, path: str = "", known: Collection[str] = ()) -> Fields:
        """Raises ClusterError unless ``value`` is a mapping whose keys are all in ``known`` (any text when empty)."""
        fields = cls({}, source, path)
        if not isinstance(value, Mapping):
            raise fields.error(
                "", f"expected keys and values, not {_show(value)}" + (f"; keys: {', '.join(known)}" if known else "")
            )
        for key in value:
            if not isinstance(key, str) or (known and key not in known):
                raise fields.error("", f"unknown key {_show(key)}; {suggest(str(key), known)}")
        return cls(value, source, path)

    def error(self, key: str, message: str) -> ClusterError:
        """A ClusterError that begins with the place of ``key``."""
        place = ".".join(p for p in (self.path, key) if p)
        return ClusterError(f"{self.source}: {place + ': ' if place else ''}{message}")

    def section(self, key: str, known: Collection[str]) -> Fields:
        """The mapping under ``key``. Raises ClusterError when it is missing, no mapping, or has unknown keys."""
        return Fields.of(self._get(key), self.source, ".".join(p for p in (self.path, key) if p), known)

    def text(self, key: str) -> str:
        """The text under ``key``. Raises ClusterError when it is missing, empty, or no text."""
        value = self._get(key)
        if not isinstance(value, str) or not value.strip():
            raise self.error(key, f"expected a name, not {_show(value)}")
        return value.strip()

    def count(self, key: str) -> int:
        """The whole number from 1 to MAX_COUNT under ``key``. Raises ClusterError for anything else."""
        number = self._number(key, {}, "a whole number, e.g. 8")
        if number != int(number) or not 1 <= number <= MAX_COUNT:
            raise self.error(key, f"{_show(self.data[key])} is not a whole number from 1 to {MAX_COUNT}")
        return int(number)

    def positive(self, key: str) -> float:
        """The number above zero under ``key``. Raises ClusterError for anything else."""
        return self._above_zero(key, self._number(key, {}, "a number, e.g. 312"))

    def share(self, key: str) -> float:
        """The number above 0 and at most 1 under ``key``. Raises ClusterError for anything else."""
        right = "a share above 0 and at most 1, e.g. 0.7"
        number = self._above_zero(key, self._number(key, {}, right))
        if number > 1:
            raise self.error(key, f"{_show(self.data[key])} is not a share; write {right}")
        return number

    def memory(self, key: str) -> int:
        """Bytes under ``key``, above zero. Raises ClusterError for anything else."""
        number = self._number(key, BYTES, "bytes, or a number with a unit, e.g. '80 GiB'")
        return max(1, round(self._above_zero(key, number)))

    def bandwidth(self, key: str) -> float:
        """Bytes per second under ``key``, above zero. Raises ClusterError for anything else."""
        number = self._number(key, BYTES_PER_SECOND, "bytes per second, or a number with a unit, e.g. '300 GB/s' or '200 Gb/s'")
        return self._above_zero(key, number)

    def latency(self, key: str) -> float:
        """Seconds under ``key``, zero or more. Raises ClusterError for anything else."""
        return self._not_below_zero(key, self._number(key, SECONDS, "seconds, or a number with a unit, e.g. '3.4 us'"))

    def amount(self, key: str) -> float:
        """The number under ``key``, zero or more. Raises ClusterError for anything else."""
        return self._not_below_zero(key, self._number(key, {}, "a number, e.g. 3e9"))

    def _get(self, key: str) -> object:
        if key not in self.data:
            raise self.error("", f"{key} is missing")
        return self.data[key]

    def _above_zero(self, key: str, number: float) -> float:
        if number <= 0:
            raise self.error(key, f"must be above zero, got {_show(self.data[key])}")
        return number

    def _not_below_zero(self, key: str, number: float) -> float:
        if number < 0:
            raise self.error(key, f"must not be below zero, got {_show(self.data[key])}")
        return number

    def _number(self, key: str, units: Mapping[str, Fraction], right: str) -> float:
        value = self._get(key)
        number: float
        if isinstance(value, str):
            parsed = _QUANTITY.fullmatch(value)
            unit = parsed[2] if parsed else ""
            if not parsed or (unit and unit not in units):
                raise self.error(key, f"{_show(value)} is not a quantity; write {right}")
            scale = units.get(unit, Fraction(1))
            number = float(parsed[1]) * scale.numerator / scale.denominator
        elif isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value) if abs(value) < 1e300 else math.inf
        else:
            raise self.error(key, f"{_show(value)} is not a quantity; write {right}")
        if not math.isfinite(number):
            raise self.error(key, f"{_show(value)} is not a finite number; write {right}")
        return number


def _show(value: object) -> str:
    """The value as a message shows it, short."""
    if value is None:
        return "nothing"
    text = repr(value) if isinstance(value, str | int | float | bool) else type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."
