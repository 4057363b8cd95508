from __future__ import annotations

import math
from dataclasses import dataclass

_GROUP = 128


@dataclass(frozen=True)
class Places:
    """How many tokens an expert takes: ``room`` of each of ``groups`` groups of tokens."""

    groups: int
    group: int
    """Tokens of a group."""
    room: int

    @property
    def count(self) -> int:
        return self.groups * self.room


def places(tokens: int, load: float, batch: int | None = None) -> Places:
    """The places of an expert that gets ``load`` tokens of each token, on average (experts chosen per token, of all)."""
    piece = tokens // batch if batch and tokens % batch == 0 else tokens
    divisors = [d for d in range(1, min(piece, 4 * _GROUP) + 1) if piece % d == 0]
    large = [d for d in divisors if d >= _GROUP] or [divisors[-1]]

    def empty(group: int) -> float:
        return math.ceil(group * load) / (group * load)

    group = min(large, key=lambda d: (round(empty(d), 2), d))
    return Places(tokens // group, group, max(1, math.ceil(group * load)))
