"""How far a search is, for whoever watches it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Progress:
    """What a search is doing. ``done`` of ``total`` steps are done, a step being one way to use the devices at level o1, one
    setting of what layers have in common at o2."""

    done: int
    total: int
    trying: Mapping[str, Any]
    """What the step in progress fixes, as a candidate does: ``{"pp": 2, "dp": 4, "mp": 1}``; empty at the end."""
    best: Mapping[str, Any]
    """The best candidate so far, as in ``plan.candidates``; empty where nothing has fitted yet."""
    step_time_s: float | None
    """Predicted seconds of its step. A lower bound, tight but for the pipeline's imbalance, until ``is_estimated``."""
    is_estimated: bool


Watcher = Callable[[Progress], None]
"""Called before each step and at the end."""


class Reporter:
    """Keeps the best so far and tells the watcher."""

    def __init__(self, watcher: Watcher | None = None):
        self._watcher = watcher
        self._best: tuple[bool, float, Mapping[str, Any]] | None = None
        self._total = 0

    def __call__(self, done: int, total: int, trying: Mapping[str, Any] | None = None) -> None:
        """Says that ``done`` of ``total`` steps are done and what the next one is."""
        self._total = total
        if self._watcher is not None:
            bounded, seconds, best = self._best or (True, None, {})
            self._watcher(Progress(done, total, trying or {}, best, seconds, not bounded))

    def found(self, seconds: float, candidate: Mapping[str, Any], is_estimated: bool) -> None:
        """Notes a candidate that fits. One that is estimated takes the place of any that is only bounded."""
        new = (not is_estimated, seconds, candidate)
        if self._best is None or new[:2] < self._best[:2]:
            self._best = new

    def finish(self, seconds: float, candidate: Mapping[str, Any]) -> None:
        """Says that all steps are done and which candidate won, which may be a simpler one than the fastest."""
        self._best = False, seconds, candidate
        self(self._total, self._total)
