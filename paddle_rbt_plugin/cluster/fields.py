"""Reading untrusted mappings, so that every complaint names the place, the value and what would be right.

A quantity is a number in base units (bytes, bytes per second, seconds) or a text with a unit: ``80 GiB``, ``200 Gb/s``,
``14 us``. A number that YAML takes for a text, such as ``1e9``, is a number here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from paddle_rbt_plugin.validation import Kind, check, shown, suggest

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


def _quantity(units: Mapping[str, Fraction]) -> BeforeValidator:
    """Reads a number, or a text with one of the units, as a number in the base unit."""

    def read(value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value) if abs(value) < 1e300 else math.inf
        parsed = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
        if not parsed or (parsed[2] and parsed[2] not in units):
            raise ValueError
        scale = units.get(parsed[2], Fraction(1))
        return float(parsed[1]) * scale.numerator / scale.denominator

    return BeforeValidator(read)


def _kind(words: str, units: Mapping[str, Fraction] | None = None, **bounds: Any) -> Kind:
    return Kind(words, Annotated[float, Field(allow_inf_nan=False, **bounds), _quantity(units or {})])


_COUNT = Kind(f"a whole number from 1 to {MAX_COUNT}, e.g. 8", Annotated[int, Field(ge=1, le=MAX_COUNT), _quantity({})])
_POSITIVE = _kind("a number above 0, e.g. 312", gt=0)
_SHARE = _kind("a share above 0 and at most 1, e.g. 0.7", gt=0, le=1)
_MEMORY = _kind("bytes above 0, or a number with a unit, e.g. '80 GiB'", BYTES, gt=0)
_BANDWIDTH = _kind("bytes per second above 0, or a number with a unit, e.g. '300 GB/s' or '200 Gb/s'", BYTES_PER_SECOND, gt=0)
_LATENCY = _kind("seconds of at least 0, or a number with a unit, e.g. '3.4 us'", SECONDS, ge=0)
_AMOUNT = _kind("a number of at least 0, e.g. 3e9", ge=0)


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
                "", f"expected keys and values, not {shown(value)}" + (f"; keys: {', '.join(known)}" if known else "")
            )
        for key in value:
            if not isinstance(key, str) or (known and key not in known):
                raise fields.error("", f"unknown key {shown(key)}; {suggest(str(key), known)}")
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
            raise self.error(key, f"expected a name, not {shown(value)}")
        return value.strip()

    def count(self, key: str) -> int:
        """The whole number from 1 to MAX_COUNT under ``key``. Raises ClusterError for anything else."""
        return self._checked(_COUNT, key)

    def positive(self, key: str) -> float:
        """The number above zero under ``key``. Raises ClusterError for anything else."""
        return self._checked(_POSITIVE, key)

    def share(self, key: str) -> float:
        """The number above 0 and at most 1 under ``key``. Raises ClusterError for anything else."""
        return self._checked(_SHARE, key)

    def memory(self, key: str) -> int:
        """Bytes under ``key``, above zero. Raises ClusterError for anything else."""
        return max(1, round(self._checked(_MEMORY, key)))

    def bandwidth(self, key: str) -> float:
        """Bytes per second under ``key``, above zero. Raises ClusterError for anything else."""
        return self._checked(_BANDWIDTH, key)

    def latency(self, key: str) -> float:
        """Seconds under ``key``, zero or more. Raises ClusterError for anything else."""
        return self._checked(_LATENCY, key)

    def amount(self, key: str) -> float:
        """The number under ``key``, zero or more. Raises ClusterError for anything else."""
        return self._checked(_AMOUNT, key)

    def _checked(self, kind: Kind, key: str) -> Any:
        place = f"{self.path}." if self.path else ""
        return check(kind, key, self._get(key), ClusterError, f"{self.source}: {place}")

    def _get(self, key: str) -> object:
        if key not in self.data:
            raise self.error("", f"{key} is missing")
        return self.data[key]
