"""Runs of layers on one stage: the fastest ways to run layers a to b with a strategy of its own for each.

A strategy arranges the devices of the stage (dp x mp) and says what is recomputed. With m micro batches a run of layers costs

    t = sum over layers of (f + b + (gradient synchronisation + update) / m)(layer, strategy)
        + sum over neighbours of resharding(strategy, next strategy) + sending
    memory = sum over layers of (states + micro batches in flight * kept) + largest revived + largest temporary
             + largest message + bucket

where a layer's part of the synchronisation is its part of the gradients, passes that wait for the host are counted layer by
layer (``estimate`` counts them stage by stage, so it is never slower), and a stage sends what it does where all have as many
layers. ``StageRuns.ends`` extends runs layer by layer and keeps
the ways that no other way beats in t, memory and each of the three maxima (``_unbeaten``). A way that ends in another strategy
beats one if it still does after resharding to that one's strategy, which is no approximation, since resharding keeps the
triangle inequality: one all-gather, larger the fewer ranks share the batch. Only beyond ``EXACT`` ways are they thinned
(``_thinned``): of those whose memory differs by less than a 256th of the device the fastest stays.

Layers that cost the same under all strategies are one kind, and runs of the same kinds are extended once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from paddle_rbt_plugin.cost.candidate import Candidate
from paddle_rbt_plugin.cost.communication import collective_seconds
from paddle_rbt_plugin.cost.memory import gradient_itemsize
from paddle_rbt_plugin.cost.stage_cost import LayerStrategy, boundary_bytes
from paddle_rbt_plugin.cost.stages import even_split
from paddle_rbt_plugin.cost.update import gradient_sync_seconds, update_seconds
from paddle_rbt_plugin.search.bounds import (
    BACKWARD,
    BACKWARD_LAUNCHES,
    FORWARD,
    FORWARD_LAUNCHES,
    KEPT,
    PARAMETERS,
    REDUCED_DP,
    REDUCED_MP,
    TRAINED,
    Bounds,
    total_state_bytes,
)

TIME, MEMORY = range(2)
"""Columns of a way that add up; three more hold the largest revived, temporary and message."""
DEVICE, HOST, CLOSING = range(3)
"""Parts of a layer's time: seconds per micro batch of kernels and collectives, of launches, seconds once per step."""
EXACT = 1000
"""Ways that are compared with each other; more are thinned."""
_BINS = 256
_BLOCK = 128

Choice = tuple[int, "Choice | None"]
"""The strategy of the last layer, and the choices before it."""


@dataclass(frozen=True)
class Option:
    """One of the strategies that layers choose from: the candidate as it is with all layers like this, on its mesh."""

    strategy: LayerStrategy
    candidate: Candidate

    @property
    def dp(self) -> int:
        return self.candidate.dp


@dataclass(frozen=True)
class Way:
    """One way to run some layers: seconds per micro batch, and the strategy of each layer."""

    seconds: float
    options: tuple[int, ...]


class StageRuns:
    """The runs of layers that stage ``stage`` may hold.

    ``in_flight`` micro batches of a step of ``steps`` are kept, ``limit`` is the bytes of a device. ``slack`` are the
    seconds by which a run may exceed its fastest strategies, memory aside, in a plan that is still of interest."""

    def __init__(
        self,
        bounds: Bounds,
        options: Sequence[Option],
        stage: int,
        steps: int,
        in_flight: float,
        limit: float,
        slack: float = np.inf,
    ):
        self.bounds = bounds
        self.options = tuple(options)
        self.stage = stage
        self.steps = steps
        self.in_flight = in_flight
        self.limit = limit
        self.slack = slack
        self.size = options[0].strategy.completion.mesh.size
        self.first = stage * self.size
        self.least_layers = 1
        """No plan gives the stage fewer, since the others cannot hold the rest."""
        costs, parts = zip(*map(self._layer_costs, self.options), strict=True)
        self._costs = np.stack(costs)
        self._parts = np.stack(parts)
        self._memo: dict[tuple[int, ...], tuple[np.ndarray, list[Choice]]] = {}

    def _layer_costs(self, option: Option) -> tuple[np.ndarray, np.ndarray]:
        """Per layer: time, memory, revived, temporary, message; and the parts of its time."""
        shared, candidate, completion = self.bounds.shared, option.candidate, option.strategy.completion
        training, c = shared.training, shared.constants
        rows = self.bounds.rows(completion, candidate, self.first)
        added = rows.added
        device, host = added[:, [FORWARD, BACKWARD]], added[:, [FORWARD_LAUNCHES, BACKWARD_LAUNCHES]] * c.host_launch_s
        params, trained = added[:, PARAMETERS], added[:, TRAINED]
        if self.stage:
            copied, trained_copies = self.bounds.tied_parameters(completion)
            params, trained = params + copied, trained + trained_copies
        memory = total_state_bytes(params, trained, candidate, training, option.dp)
        memory = memory + (self.in_flight * added[:, KEPT] if training.mode == "train" else 0.0)
        sync, update = self._closing(option, added, trained)
        seconds = np.maximum(device, host).sum(1) + (sync + update) / self.steps
        closing = update if training.overlap_gradients else sync + update
        return np.column_stack([seconds, memory, rows.largest]), np.column_stack([device.sum(1), host.sum(1), closing])

    def _closing(self, option: Option, added: np.ndarray, trained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Per layer, seconds of gradient synchronisation and of the update in a step: no more than its part of any stage's,
        since buckets that are not full take longer for their bytes."""
        shared, candidate = self.bounds.shared, option.candidate
        training, c = shared.training, shared.constants
        if training.mode != "train":
            return np.zeros(len(added)), np.zeros(len(added))
        _, machine = shared.machine(option.strategy.completion.mesh, self.first)
        shards = candidate.shards(option.dp)
        update = trained * (update_seconds(1.0, training, machine.device, c) / shards)
        sync = np.zeros(len(added))
        nbytes = added[:, [REDUCED_DP, REDUCED_MP]] * gradient_itemsize(training)
        dp, mp = machine.networks.get("dp"), machine.networks.get("mp")
        if dp is not None:
            sync += nbytes[:, 0] * (gradient_sync_seconds(c.bucket_bytes, candidate, dp, c) / c.bucket_bytes)
        whole = float(nbytes[:, 1].sum())
        if mp is not None and whole:
            sync += nbytes[:, 1] * (collective_seconds("all_reduce", whole, mp, c) / whole)
        return sync, update

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Per layer a number, equal for layers that cost the same under every strategy."""
        numbers: dict[bytes, int] = {}
        return tuple(numbers.setdefault(self._costs[:, i].tobytes(), i) for i in range(self._costs.shape[1]))

    @cached_property
    def _reshard(self) -> np.ndarray:
        """Seconds forward and backward between two neighbouring layers of given strategies."""
        n = len(self.options)
        seconds = np.zeros((n, n))
        nbytes = [self._boundary(option) for option in self.options]
        for i, before in enumerate(self.options):
            for j, after in enumerate(self.options):
                if before.dp != after.dp:
                    seconds[i, j] = self.bounds.shared.regroup_seconds(
                        max(nbytes[i], nbytes[j]), before.dp, after.dp, self.size, self.first
                    )
        return seconds

    def _boundary(self, option: Option) -> float:
        completion = option.strategy.completion
        last = max(i for i, s in enumerate(completion.layers.segments) if s.is_block)
        return boundary_bytes(completion.work[last], self.bounds.sizes(completion, option.candidate, last))

    @cached_property
    def _sends(self) -> np.ndarray:
        """Seconds in which the stage sends, by the strategy of the last layer and as if stages were even."""
        return np.array([self._sent(option) for option in self.options])

    def _sent(self, option: Option) -> float:
        completion, pp = option.strategy.completion, option.candidate.pp
        sends = self.bounds.shared.sends(completion, option.candidate, even_split(completion.layers.count, pp))
        return sends.ahead[self.stage] + sends.back[self.stage]

    def least_seconds(self) -> np.ndarray:
        """Per layer, the least time under any strategy."""
        return self._costs[:, :, TIME].min(0)

    def least_parts(self) -> np.ndarray:
        """The same for each part of the time: layers x (device, host, closing)."""
        return self._parts.min(0)

    def most_layers(self) -> int:
        """No more layers than these fit, whatever their strategies."""
        least = np.sort(self._costs[:, :, MEMORY].min(0))
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
        key = self.kinds[start : end + 1]
        if key not in self._memo:
            layer = self._costs[:, end]
            values: np.ndarray = layer
            choices: list[Choice] = [(i, None) for i in range(len(self.options))]
            if start < end:
                values, choices = self._append(*self._extended(start, end - 1), layer)
            fits = self._promising(values, start, end)
            self._memo[key] = self._unbeaten(values[fits], [choices[i] for i in fits])
        return self._memo[key]

    def _append(self, before: np.ndarray, chosen: list[Choice], layer: np.ndarray) -> tuple[np.ndarray, list[Choice]]:
        n, k = len(self.options), len(before)
        old, new = np.repeat(before, n, axis=0), np.tile(layer, (k, 1))
        values = np.concatenate([old[:, :2] + new[:, :2], np.maximum(old[:, 2:], new[:, 2:])], axis=1)
        values[:, TIME] += self._reshard[[c[0] for c in chosen]].reshape(-1)
        return values, [(j, c) for c in chosen for j in range(n)]

    def _promising(self, values: np.ndarray, start: int, end: int) -> np.ndarray:
        """The ways that fit, with the layers that the run lacks at least, and that are not too slow; fastest first."""
        missing = max(0, self.least_layers - (end + 1 - start))
        needed = values[:, MEMORY] + values[:, 2:].sum(1) + missing * self._costs[:, :, MEMORY].min()
        excess = values[:, TIME] - self.least_seconds()[start : end + 1].sum()
        order = np.lexsort(values.T[::-1])
        return order[((needed <= self.limit) & (excess <= self.slack))[order]]

    def _unbeaten(self, values: np.ndarray, choices: list[Choice]) -> tuple[np.ndarray, list[Choice]]:
        """The ways that no other beats; they come fastest first."""
        last = np.array([c[0] for c in choices], dtype=int)
        if len(values) > EXACT:
            some = self._thinned(values, last)
            values, choices, last = values[some], [choices[i] for i in some], last[some]
        kept = np.zeros(0, dtype=int)
        for start in range(0, len(values), _BLOCK):  # by blocks, since most are beaten by few
            block = np.arange(start, min(start + _BLOCK, len(values)))
            rivals = np.concatenate((kept, block))
            beats = values[rivals, None, TIME] + self._reshard[np.ix_(last[rivals], last[block])] <= values[block, TIME]
            beats &= rivals[:, None] < block
            for column in range(1, values.shape[1]):
                beats &= values[rivals, None, column] <= values[block, column]
            kept = np.concatenate((kept, block[~beats.any(0)]))
        return values[kept], [choices[i] for i in kept]

    def _thinned(self, values: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Of the ways with the same last strategy and nearly the same memory, the fastest, and of these only those that are
        faster than all that need less."""
        bins = np.minimum(_BINS - 1, ((values[:, MEMORY] + values[:, 2:].sum(1)) / self.limit * _BINS).astype(int))
        fastest = np.full((len(self.options), _BINS), np.inf)
        np.minimum.at(fastest, (last, bins), values[:, TIME])
        lower = np.concatenate([np.full((len(self.options), 1), np.inf), np.minimum.accumulate(fastest, axis=1)], axis=1)
        reached = (lower[:, None, :] + self._reshard[:, :, None]).min(0)
        is_fastest = (values[:, TIME] == fastest[last, bins]) & (values[:, TIME] < reached[last, bins])
        return np.flatnonzero(is_fastest)

    def _finished(self, values: np.ndarray, choices: list[Choice]) -> Way:
        """The fastest way, its result sent."""
        seconds = values[:, TIME] + self._sends[[c[0] for c in choices]]
        i = int(np.argmin(seconds))
        return Way(float(seconds[i]), _unwound(choices[i]))


def _unwound(choice: Choice | None) -> tuple[int, ...]:
    options = []
    while choice is not None:
        options.append(choice[0])
        choice = choice[1]
    return tuple(reversed(options))


def option_of(candidate: Candidate, strategy: LayerStrategy, samples: int) -> Option:
    """A strategy as a candidate of its own; ``samples`` is the batch of all ranks of a stage in one micro step."""
    mesh = strategy.completion.mesh
    dp, mp = mesh.degree("dp"), mesh.degree("mp")
    return Option(
        strategy,
        replace(candidate, dp=dp, mp=mp, ep=mesh.degree("ep"), micro_batch=samples // dp, recompute=strategy.recompute),
    )
