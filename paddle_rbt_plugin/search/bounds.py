"""Lower bounds on the cost of candidates: what the search prunes by.

A family of candidates is bounded at once: by the least time of a step and by the memory of every stage, both as
``cost.step_costs`` has them. The estimate is made of the same numbers, so no bound is above it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from paddle_rbt_plugin.cost.candidate import Candidate
from paddle_rbt_plugin.cost.step_costs import StepCosts
from paddle_rbt_plugin.search.space import Family, order_of


@dataclass(frozen=True)
class Bound:
    """Of one candidate: seconds it takes at least, and for its tightest stage the bytes it needs and may have."""

    step_time_s: float
    peak_memory_bytes: float
    memory_limit_bytes: float
    device: str

    @property
    def missing_bytes(self) -> float:
        """Bytes by which the tightest stage misses its device; 0 or less where it fits."""
        return self.peak_memory_bytes - self.memory_limit_bytes


class FamilyBounds:
    """The bounds of the members of a family."""

    def __init__(self, family: Family, costs: StepCosts, memory_reserve: float):
        self.family = family
        self.seconds = costs.least_seconds
        self._costs = costs
        self._limit = costs.pipeline.stages.device_memory * (1.0 - memory_reserve)
        missing = costs.peak - self._limit
        self._tightest = missing.argmax(1)
        self.missing_bytes = missing[np.arange(len(missing)), self._tightest]

    def of(self, index: int) -> Bound:
        """The bound of one member."""
        stage = int(self._tightest[index])
        return Bound(
            float(self.seconds[index]),
            float(self._costs.peak[index, stage]),
            float(self._limit[stage]),
            self._costs.pipeline.stages.machines[stage].name,
        )

    def fitting(self, members: np.ndarray) -> Fitting:
        """Some members, by their positions, which may run."""
        return Fitting(self.family, members, self.seconds[members])


Bounded = tuple[float, Candidate]
"""A candidate that may run, behind the lower bound of its step."""


@dataclass(frozen=True, eq=False)
class Fitting:
    """Members of a family that may run, by their positions, and the bounds of their steps."""

    family: Family
    members: np.ndarray
    seconds: np.ndarray

    def __len__(self) -> int:
        return len(self.members)


def ascending(found: Sequence[Fitting]) -> Iterator[Bounded]:
    """By growing bound; those of equal bounds in the order of the candidates."""
    if not found:
        return
    seconds = np.concatenate([some.seconds for some in found])
    members = np.concatenate([some.members for some in found])
    family = np.repeat(np.arange(len(found)), [len(some) for some in found])
    for bound, alike in groupby(np.argsort(seconds, kind="stable").tolist(), key=lambda i: float(seconds[i])):
        candidates = [found[family[i]].family.member(members[i]) for i in alike]
        yield from ((bound, candidate) for candidate in sorted(candidates, key=order_of))
