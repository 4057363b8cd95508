"""What each layer costs on one stage under each of some strategies, and what lies between layers.

A strategy arranges the devices of the stage (dp x mp) and says what is recomputed. With m micro batches a layer takes

    f + b + (gradient synchronisation + update) / m

seconds per micro batch, where its part of the synchronisation is its part of the gradients, and passes that wait for the host
are counted layer by layer (``estimate`` counts them stage by stage, so it is never slower). Neighbours on meshes of other
shapes reshard hidden states, and the last layer of a stage sends what it would if all stages had as many layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from paddle_rbt_plugin.completion.work import Completion
from paddle_rbt_plugin.cost.candidate import Candidate
from paddle_rbt_plugin.cost.communication import collective_seconds
from paddle_rbt_plugin.cost.costs import CandidateCosts
from paddle_rbt_plugin.cost.memory import gradient_itemsize, state_bytes
from paddle_rbt_plugin.cost.segment_table import (
    BACKWARD,
    FORWARD,
    KEPT,
    LAUNCHES,
    PARAMETERS,
    RECOMPUTE,
    REDUCED_DP,
    REDUCED_MP,
    TRAINED,
)  # fmt: skip
from paddle_rbt_plugin.cost.stage_costs import LayerStrategy
from paddle_rbt_plugin.cost.stages import make_cut
from paddle_rbt_plugin.cost.table import Strategy
from paddle_rbt_plugin.cost.update import gradient_sync_seconds, update_seconds

TIME, MEMORY = range(2)
"""Columns of costs that add up over layers; three more hold the largest revived, temporary and message."""
DEVICE, HOST, CLOSING = range(3)
"""Parts of a layer's time: seconds per micro batch of kernels and collectives, of launches, seconds once per step."""


@dataclass(frozen=True)
class Option:
    """One of the strategies that layers choose from: the candidate as it is with all layers like this, on its mesh."""

    strategy: LayerStrategy
    candidate: Candidate

    @property
    def dp(self) -> int:
        return self.candidate.dp


def option_of(candidate: Candidate, strategy: LayerStrategy, samples: int) -> Option:
    """A strategy as a candidate of its own; ``samples`` is the batch of all ranks of a stage in one micro step."""
    mesh = strategy.completion.mesh
    dp, mp = mesh.degree("dp"), mesh.degree("mp")
    return Option(
        strategy,
        replace(candidate, dp=dp, mp=mp, ep=mesh.degree("ep"), micro_batch=samples // dp, recompute=strategy.recompute),
    )


class LayerCosts:
    """Costs on stage ``stage`` under ``options``, where ``in_flight`` micro batches of a step of ``steps`` are kept.

    ``layers`` holds seconds and bytes per option and layer (columns ``TIME``, ``MEMORY``, ...), ``parts`` what the seconds are
    made of (``DEVICE``, ``HOST``, ``CLOSING``)."""

    def __init__(self, costs: CandidateCosts, options: Sequence[Option], stage: int, steps: int, in_flight: float):
        self.table = costs.table
        self.options = tuple(options)
        self.stage = stage
        self.steps = steps
        self.in_flight = in_flight
        self.size = options[0].strategy.completion.mesh.size
        self.first = stage * self.size
        layers, parts = zip(*map(self._layer_costs, self.options), strict=True)
        self.layers = np.stack(layers)
        self.parts = np.stack(parts)

    def _layer_costs(self, option: Option) -> tuple[np.ndarray, np.ndarray]:
        """Per layer: time, memory, revived, temporary, message; and the parts of its time."""
        candidate, completion, training = option.candidate, option.strategy.completion, self.table.training
        machine = self.table.machines.of(completion.mesh, self.first)
        strategy = Strategy(candidate.recompute, candidate.sequence_parallel)
        rows = self.table.rows(completion, machine, strategy, (candidate.micro_batch,))
        added = rows.added[0]
        passes, launches = added[:, :LAUNCHES].reshape(-1, 3, 3).sum(2), added[:, LAUNCHES:KEPT]
        device = np.column_stack((passes[:, FORWARD], passes[:, RECOMPUTE] + passes[:, BACKWARD]))
        host = np.column_stack((launches[:, FORWARD], launches[:, RECOMPUTE] + launches[:, BACKWARD]))
        host *= self.table.constants.host_launch_s
        params, trained = added[:, PARAMETERS], added[:, TRAINED]
        if self.stage and training.own_copies:
            copied, trained_copies = copied_parameters(completion)
            params, trained = params + copied, trained + trained_copies
        states = state_bytes(params, trained, candidate, training, option.dp)
        memory = states.parameters + states.master_weights + states.gradients + states.optimizer_states
        memory = memory + (self.in_flight * added[:, KEPT] if training.mode == "train" else 0.0)
        sync, update = self._closing(option, added, trained)
        seconds = np.maximum(device, host).sum(1) + (sync + update) / self.steps
        closing = update if training.overlap_gradients else sync + update
        return np.column_stack([seconds, memory, rows.largest[0]]), np.column_stack([device.sum(1), host.sum(1), closing])

    def _closing(self, option: Option, added: np.ndarray, trained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Per layer, seconds of gradient synchronisation and of the update in a step: no more than its part of any stage's,
        since buckets that are not full take longer for their bytes."""
        candidate, training, c = option.candidate, self.table.training, self.table.constants
        if training.mode != "train":
            return np.zeros(len(added)), np.zeros(len(added))
        machine = self.table.machines.of(option.strategy.completion.mesh, self.first)
        shards = candidate.shards(option.dp)
        update = trained * (update_seconds(1.0, training, machine.device, c) / shards)
        nbytes = added[:, [REDUCED_DP, REDUCED_MP]] * gradient_itemsize(training)
        once, each = gradient_sync_seconds(c.bucket_bytes, candidate.sharding_stage, shards, machine.network("dp"), c)
        sync = nbytes[:, 0] * ((once + each * candidate.accumulate_steps) / c.bucket_bytes)
        mp, whole = machine.network("mp"), float(nbytes[:, 1].sum())
        if mp is not None and whole:
            sync += nbytes[:, 1] * (collective_seconds("all_reduce", whole, mp, c) / whole)
        return sync, update

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Per layer a number, equal for layers that cost the same under every strategy."""
        numbers: dict[bytes, int] = {}
        return tuple(numbers.setdefault(self.layers[:, i].tobytes(), i) for i in range(self.layers.shape[1]))

    @cached_property
    def reshard(self) -> np.ndarray:
        """Seconds forward and backward between two neighbouring layers of given strategies."""
        n = len(self.options)
        seconds = np.zeros((n, n))
        nbytes = [self._boundary(option) for option in self.options]
        for i, before in enumerate(self.options):
            for j, after in enumerate(self.options):
                if before.dp != after.dp:
                    moved = max(nbytes[i], nbytes[j])
                    seconds[i, j] = self.table.machines.regroup_seconds(moved, before.dp, after.dp, self.size, self.first)
        return seconds

    def _boundary(self, option: Option) -> float:
        completion = option.strategy.completion
        last = max(i for i, s in enumerate(completion.layers.segments) if s.is_block)
        return self.table.boundary_bytes(completion, last, option.candidate.micro_batch)

    @cached_property
    def sends(self) -> np.ndarray:
        """Seconds in which the stage sends, by the strategy of the last layer and as if stages were even."""
        return np.array([self._sent(option) for option in self.options])

    def _sent(self, option: Option) -> float:
        completion, candidate = option.strategy.completion, option.candidate
        cut = make_cut(completion.layers.count, candidate.pp)
        strategy = Strategy(candidate.recompute, candidate.sequence_parallel)
        sends = self.table.sends(completion, cut, strategy, (candidate.micro_batch,))
        return float(sends.ahead[0, self.stage] + sends.back[0, self.stage])

    def least_seconds(self) -> np.ndarray:
        """Per layer, the least time under any strategy."""
        return self.layers[:, :, TIME].min(0)

    def least_parts(self) -> np.ndarray:
        """The same for each part of the time: layers x (device, host, closing)."""
        return self.parts.min(0)


def copied_parameters(completion: Completion) -> np.ndarray:
    """Per layer, elements on one device of parameters that an earlier layer holds and it holds a copy of: all, and those that
    are trained."""
    found = np.zeros((2, completion.layers.count))
    for crossing in completion.crossings:
        if crossing.value.kind == "param":
            numel = crossing.value.local_numel(completion.mesh, 1.0)
            for reader in crossing.readers:
                found[:, reader] += numel, numel if crossing.has_gradient else 0
    return found
