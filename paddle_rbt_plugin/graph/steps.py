"""One op written as several: the steps of the new spelling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One op of the new spelling. ``inputs`` names operands by slot: ``-1`` is the first operand of the op that is replaced,
    ``-2`` the second one, and n the result of step n. The last step's result is that of the op."""

    type: str
    inputs: Mapping[str, int]
    attrs: Mapping[str, Any]
    shape: Shape
    """Of its result."""
