"""Runs of layers on one stage: the fastest ways to run layers a to b with a strategy of its own for each.

With the costs of ``layer_costs`` a run of layers takes

    t = sum over layers + sum over neighbours of resharding(strategy, next strategy) + sending
    memory = sum over layers of (states + micro batches in flight * kept) + largest revived + largest temporary
             + largest message + bucket

``StageRuns.ends`` extends runs layer by layer and keeps the ways that no other way beats in t, memory and each of the three
maxima (``_unbeaten``). A way that ends in another strategy beats one if it still does after resharding to that one's strategy,
and if it takes no longer with the sending where the run ends. That is no approximation, since resharding keeps the triangle
inequality: one all-gather, larger the fewer ranks share the batch. Only beyond ``EXACT`` ways are they thinned (``_thinned``):
of those whose memory differs by less than a 256th of the device the fastest stays.

Layers that cost the same under all strategies are one kind, and runs of the same kinds are extended once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddle_rbt_plugin.search.layer_costs import MEMORY, TIME, LayerCosts

EXACT = 1000
"""Ways that are compared with each other; more are thinned."""
_BINS = 256
_BLOCK = 128

Choice = tuple[int, "Choice | None"]
"""The strategy of the last layer, and the choices before it."""


@dataclass(frozen=True)
class Way:
    """One way to run some layers: seconds per micro batch, and the strategy of each layer."""

    seconds: float
    options: tuple[int, ...]


class StageRuns:
    """The runs of layers that a stage of the given ``costs`` may hold.

    ``limit`` is the bytes of a device. ``slack`` are the seconds by which a run may exceed its fastest strategies, memory
    aside, in a plan that is still of interest."""

    def __init__(self, costs: LayerCosts, limit: float, slack: float = np.inf):
        self.costs = costs
        self.limit = limit
        self.slack = slack
        self.least_layers = 1
        """No plan gives the stage fewer, since the others cannot hold the rest."""
        self._memo: dict[tuple[int, ...], tuple[np.ndarray, list[Choice]]] = {}

    def most_layers(self) -> int:
        """No more layers than these fit, whatever their strategies."""
        least = np.sort(self.costs.layers[:, :, MEMORY].min(0))
        return int(np.searchsorted(np.cumsum(least), self.limit, side="right"))

    def ends(self, start: int, last: int) -> list[Way]:
        """The fastest way to run layers ``start`` to ``end``, for each end from ``start`` on to ``last``, or to the last one
        for which there is any."""
        found: list[Way] = []
        for end in range(start, last + 1):
            values, choices = self._extended(start, end)
            if not len(values):
                break
            found.append(self._finished(values, choices))
        return found

    def _extended(self, start: int, end: int) -> tuple[np.ndarray, list[Choice]]:
        key = self.costs.kinds[start : end + 1]
        if key not in self._memo:
            layer = self.costs.layers[:, end]
            values: np.ndarray = layer
            choices: list[Choice] = [(i, None) for i in range(len(self.costs.options))]
            if start < end:
                values, choices = self._append(*self._extended(start, end - 1), layer)
            fits = self._promising(values, start, end)
            self._memo[key] = self._unbeaten(values[fits], [choices[i] for i in fits])
        return self._memo[key]

    def _append(self, before: np.ndarray, chosen: list[Choice], layer: np.ndarray) -> tuple[np.ndarray, list[Choice]]:
        n, k = len(self.costs.options), len(before)
        old, new = np.repeat(before, n, axis=0), np.tile(layer, (k, 1))
        values = np.concatenate([old[:, :2] + new[:, :2], np.maximum(old[:, 2:], new[:, 2:])], axis=1)
        values[:, TIME] += self.costs.reshard[[c[0] for c in chosen]].reshape(-1)
        return values, [(j, c) for c in chosen for j in range(n)]

    def _promising(self, values: np.ndarray, start: int, end: int) -> np.ndarray:
        """The ways that fit, with the layers that the run lacks at least, and that are not too slow; fastest first."""
        missing = max(0, self.least_layers - (end + 1 - start))
        needed = values[:, MEMORY] + values[:, 2:].sum(1) + missing * self.costs.layers[:, :, MEMORY].min()
        excess = values[:, TIME] - self.costs.least_seconds()[start : end + 1].sum()
        order = np.lexsort(values.T[::-1])
        return order[((needed <= self.limit) & (excess <= self.slack))[order]]

    def _unbeaten(self, values: np.ndarray, choices: list[Choice]) -> tuple[np.ndarray, list[Choice]]:
        """The ways that no other beats; they come fastest first."""
        last = np.array([c[0] for c in choices], dtype=int)
        if len(values) > EXACT:
            some = self._thinned(values, last)
            values, choices, last = values[some], [choices[i] for i in some], last[some]
        kept, finished = np.zeros(0, dtype=int), values[:, TIME] + self.costs.sends[last]
        for start in range(0, len(values), _BLOCK):  # by blocks, since most are beaten by few
            block = np.arange(start, min(start + _BLOCK, len(values)))
            rivals = np.concatenate((kept, block))
            beats = values[rivals, None, TIME] + self.costs.reshard[np.ix_(last[rivals], last[block])] <= values[block, TIME]
            beats &= finished[rivals, None] <= finished[block]  # a run that ends here does not reshard before it sends
            beats &= rivals[:, None] < block
            for column in range(1, values.shape[1]):
                beats &= values[rivals, None, column] <= values[block, column]
            kept = np.concatenate((kept, block[~beats.any(0)]))
        return values[kept], [choices[i] for i in kept]

    def _thinned(self, values: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Of the ways with the same last strategy and nearly the same memory, the fastest, and of these only those that are
        faster than all that need less."""
        bins = np.minimum(_BINS - 1, ((values[:, MEMORY] + values[:, 2:].sum(1)) / self.limit * _BINS).astype(int))
        fastest = np.full((len(self.costs.options), _BINS), np.inf)
        np.minimum.at(fastest, (last, bins), values[:, TIME])
        lower = np.concatenate([np.full((len(self.costs.options), 1), np.inf), np.minimum.accumulate(fastest, axis=1)], axis=1)
        reached = (lower[:, None, :] + self.costs.reshard[:, :, None]).min(0)
        is_fastest = (values[:, TIME] == fastest[last, bins]) & (values[:, TIME] < reached[last, bins])
        return np.flatnonzero(is_fastest)

    def _finished(self, values: np.ndarray, choices: list[Choice]) -> Way:
        """The fastest way, its result sent."""
        seconds = values[:, TIME] + self.costs.sends[[c[0] for c in choices]]
        i = int(np.argmin(seconds))
        return Way(float(seconds[i]), _unwound(choices[i]))


def _unwound(choice: Choice | None) -> tuple[int, ...]:
    options = []
    while choice is not None:
        options.append(choice[0])
        choice = choice[1]
    return tuple(reversed(options))
