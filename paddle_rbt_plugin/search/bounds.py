"""Lower bounds on the cost of candidates, as arrays over stages: what the search prunes by.

For p stages of v chunks, with f and b the times of a forward and a backward pass through one chunk (the sending included) and
m micro batches,

    step >= max over stages s of ( sum over i < s of (f_i0 + b_i0) + m * sum over chunks c of (f_sc + b_sc) )
            + gradient synchronisation and update of the stage with most parameters to train,

since stage s starts when the first micro batch has come through the stages before it, is busy with m of them, and its last
gradient still goes back through those stages. With equal stages and FThenB or 1F1B this is the step itself. Memory is that of
``cost.stage_cost`` for every stage, so a candidate whose bound exceeds a device is infeasible.

``Bounds.of`` gives both for one candidate. The costs of segments come from ``SharedCosts``, the formulas of states,
synchronisation and update from ``cost``; what is here is only their sum over stages. ``tests/test_search_bounds.py`` holds the
bounds against ``estimate``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from paddle_rbt_plugin.cluster import Device, ProcessMesh
from paddle_rbt_plugin.completion import Completion
from paddle_rbt_plugin.cost.candidate import Candidate, Schedule, Training
from paddle_rbt_plugin.cost.communication import collective_seconds
from paddle_rbt_plugin.cost.memory import gradient_itemsize, state_bytes
from paddle_rbt_plugin.cost.pipeline import in_flight
from paddle_rbt_plugin.cost.segments import Machine
from paddle_rbt_plugin.cost.shared import SharedCosts
from paddle_rbt_plugin.cost.sizes import Sizes
from paddle_rbt_plugin.cost.stages import even_split
from paddle_rbt_plugin.cost.update import exposed_seconds, gradient_sync_seconds, update_seconds

FORWARD, FORWARD_LAUNCHES, BACKWARD, BACKWARD_LAUNCHES, KEPT, PARAMETERS, TRAINED, REDUCED_DP, REDUCED_MP = range(9)
"""Columns that add up over the segments of a stage: seconds, launches, bytes, elements."""
REVIVED, TEMPORARY, MESSAGE = range(3)
"""Columns of which the largest counts: bytes."""


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


@dataclass(frozen=True)
class LayerRows:
    """Costs of the layers of a model under one strategy: one row per layer, columns as above."""

    added: np.ndarray
    largest: np.ndarray


@dataclass(frozen=True)
class _Layout:
    """Which distinct segments each layer holds. ``tied`` are parameters that a layer reads and another layer holds:
    (reading layer, holding layer, elements on one device, those of them that are trained)."""

    distinct: tuple[int, ...]
    counts: np.ndarray
    tied: tuple[tuple[int, int, int, int], ...]


class Bounds:
    """Bounds of candidates of one search; remembers what candidates have in common."""

    def __init__(self, shared: SharedCosts, memory_reserve: float):
        self.shared = shared
        self.memory_reserve = memory_reserve
        self._layouts: dict[tuple[Any, ...], tuple[Completion, _Layout]] = {}
        self._rows: dict[tuple[Any, ...], LayerRows] = {}
        self._machine_lists: dict[tuple[Any, ...], list[tuple[Device, Machine]]] = {}
        self._stages: dict[tuple[Any, ...], _Stages] = {}

    def of(self, completion: Completion, candidate: Candidate) -> Bound:
        """The bounds of a candidate with stages as even as the layers allow."""
        stages = self._stages_of(completion, candidate)
        training, train = self.shared.training, self.shared.training.mode == "train"
        dp, pp, steps = completion.mesh.degree("dp"), candidate.pp, candidate.accumulate_steps
        step = float(np.max(stages.before + steps * stages.busy))
        if train:
            step += self._closing(stages, completion, candidate)
        peak = total_state_bytes(stages.parameters, stages.trained, candidate, training, dp) + stages.transient
        if train:
            peak = peak + stages.kept * _in_flight(candidate.schedule, pp, steps, candidate.vpp)
        if train and dp > 1:
            peak = peak + np.minimum(self.shared.constants.bucket_bytes, stages.trained * gradient_itemsize(training))
        tightest = int(np.argmax(peak - stages.limit))
        return Bound(step, float(peak[tightest]), float(stages.limit[tightest]), stages.devices[tightest])

    def rows(self, completion: Completion, candidate: Candidate, first: int) -> LayerRows:
        """Costs of all layers under a candidate's strategy on the ranks that begin with ``first``."""
        _, machine = self.shared.machine(completion.mesh, first)
        key = (id(completion.work), id(machine), candidate.micro_batch, candidate.sequence_parallel, candidate.recompute)
        if key not in self._rows:
            self._rows[key] = self._layer_rows(completion, candidate, machine)
        return self._rows[key]

    def _layer_rows(self, completion: Completion, candidate: Candidate, machine: Machine) -> LayerRows:
        layout = self._layout(completion)
        train = self.shared.training.mode == "train"
        added, largest = [], []
        for i in layout.distinct:
            work = completion.work[i]
            sizes = self.sizes(completion, candidate, i)
            cost = self.shared.segment(work, completion.layers.segments[i].is_block, machine, sizes, candidate)
            backward = cost.recompute + cost.backward
            reduced = dict.fromkeys(("dp", "mp"), 0.0)
            for sync in work.gradient_syncs:
                reduced[sync.axis] += sizes.numel(sync.value)
            ahead = cost.forward.compute + cost.forward.communication
            back = backward.compute + backward.communication
            params, trained = (sum(map(sizes.numel, values)) for values in (work.params, work.trained))
            row = (ahead, cost.forward.launches, back, backward.launches, cost.kept, params, trained)
            added.append((*row, reduced["dp"], reduced["mp"]))
            largest.append((cost.revived if train else 0.0, cost.temporary, cost.message))
        held = layout.counts[:, :, None] > 0
        return LayerRows(layout.counts @ np.array(added, float), np.where(held, np.array(largest, float)[None], 0.0).max(1))

    def sizes(self, completion: Completion, candidate: Candidate, segment: int) -> Sizes:
        """Local sizes of a segment's values."""
        scale = candidate.micro_batch * completion.mesh.degree("dp") / completion.batch
        return self.shared.sizes(completion.work[segment], completion.mesh, scale, candidate.sequence_parallel)

    def _layout(self, completion: Completion) -> _Layout:
        key = (id(completion.work), completion.mesh.shape)
        if key not in self._layouts:
            self._layouts[key] = completion, _layout(completion)
        return self._layouts[key][1]

    def _stages_of(self, completion: Completion, candidate: Candidate) -> _Stages:
        """Sums over stages; the same for candidates that differ in ZeRO stage, order of schedule or accumulation only."""
        mesh, pp = completion.mesh, candidate.pp
        chunks = candidate.vpp if pp > 1 else 1
        strategy = (candidate.micro_batch, candidate.sequence_parallel, candidate.recompute)
        key = (id(completion.work), mesh.axes, mesh.shape, pp, chunks, *strategy)
        if key not in self._stages:
            self._stages[key] = self._sum_stages(completion, candidate, pp, chunks)
        return self._stages[key]

    def _sum_stages(self, completion: Completion, candidate: Candidate, pp: int, chunks: int) -> _Stages:
        size, count, c = completion.mesh.size, completion.layers.count, self.shared.constants
        starts = _starts(count, pp * chunks)
        machines = self._machines(completion.mesh, pp)
        added = np.empty((chunks, pp, 9))
        largest = np.empty((chunks, pp, 3))
        for s, here in self._machine_groups(completion.mesh, pp):
            rows = self.rows(completion, candidate, s * size)
            added[:, here] = np.add.reduceat(rows.added, starts, axis=0).reshape(chunks, pp, 9)[:, here]
            largest[:, here] = np.maximum.reduceat(rows.largest, starts, axis=0).reshape(chunks, pp, 3)[:, here]
        sends = self.shared.sends(completion, candidate, even_split(count, pp * chunks))
        ahead = np.maximum(added[..., FORWARD], added[..., FORWARD_LAUNCHES] * c.host_launch_s)
        ahead = ahead + np.reshape(sends.ahead, (chunks, pp))
        back = np.maximum(added[..., BACKWARD], added[..., BACKWARD_LAUNCHES] * c.host_launch_s)
        back = back + np.reshape(sends.back, (chunks, pp))
        total = added.sum(0)
        chunk_of = np.repeat(np.arange(pp * chunks), np.diff([*starts, count]))
        for reading, holding, *numels in self._tied(completion):
            if chunk_of[reading] % pp != chunk_of[holding] % pp:
                total[chunk_of[reading] % pp, [PARAMETERS, TRAINED]] += numels
        devices = [d for d, _ in machines]
        return _Stages(
            before=np.concatenate(([0.0], np.cumsum(ahead[0] + back[0])[:-1])),
            busy=(ahead + back).sum(0),
            backward=total[:, BACKWARD],
            kept=total[:, KEPT] + sends.received,
            parameters=total[:, PARAMETERS],
            trained=total[:, TRAINED],
            reduced=total[:, [REDUCED_DP, REDUCED_MP]],
            transient=largest.max(0).sum(1),
            limit=np.array([d.memory * (1.0 - self.memory_reserve) for d in devices]),
            devices=tuple(d.name for d in devices),
            machines=tuple(m for _, m in machines),
        )

    def _machines(self, mesh: ProcessMesh, pp: int) -> list[tuple[Device, Machine]]:
        """Device and machine of every stage."""
        key = (mesh.axes, mesh.shape, pp)
        if key not in self._machine_lists:
            self._machine_lists[key] = [self.shared.machine(mesh, s * mesh.size) for s in range(pp)]
        return self._machine_lists[key]

    def _machine_groups(self, mesh: ProcessMesh, pp: int) -> list[tuple[int, np.ndarray]]:
        """The stages on each distinct machine: the first of them, and which they are."""
        numbers: dict[int, int] = {}
        of = np.array([numbers.setdefault(id(m), s) for s, (_, m) in enumerate(self._machines(mesh, pp))])
        return [(s, of == s) for s in numbers.values()]

    def tied_parameters(self, completion: Completion) -> np.ndarray:
        """Per layer, elements on one device of parameters that an earlier layer holds and it holds a copy of: all, and those
        that are trained."""
        found = np.zeros((2, completion.layers.count))
        for reading, _, *numels in self._tied(completion):
            found[:, reading] += numels
        return found

    def _tied(self, completion: Completion) -> tuple[tuple[int, int, int, int], ...]:
        return self._layout(completion).tied if self.shared.training.own_copies else ()

    def _closing(self, stages: _Stages, completion: Completion, candidate: Candidate) -> float:
        """Synchronisation and update of the stage with most parameters."""
        s = int(np.argmax(stages.trained))
        training, c, machine = self.shared.training, self.shared.constants, stages.machines[s]
        seconds = 0.0
        for axis, numel in zip(("dp", "mp"), stages.reduced[s], strict=True):
            net, nbytes = machine.networks.get(axis), float(numel) * gradient_itemsize(training)
            if net is None or not nbytes:
                continue
            if axis == "mp":
                seconds += collective_seconds("all_reduce", nbytes, net, c)
                continue
            sync = gradient_sync_seconds(nbytes, candidate, net, c)
            beside = float(stages.backward[s])
            seconds += exposed_seconds(sync, nbytes, beside, c) if training.overlap_gradients else sync
        shards = candidate.shards(completion.mesh.degree("dp"))
        return seconds + update_seconds(float(stages.trained[s]) / shards, training, machine.device, c)


def total_state_bytes(
    parameters: np.ndarray, trained: np.ndarray, candidate: Candidate, training: Training, shards: int
) -> np.ndarray:
    """``cost.memory.state_bytes`` for arrays of elements, in all."""
    states: Any = state_bytes(parameters, trained, candidate, training, shards)  # type: ignore[arg-type]
    return states.parameters + states.master_weights + states.gradients + states.optimizer_states


@dataclass(frozen=True)
class _Stages:
    """Arrays with one entry per stage: seconds per micro batch, bytes, elements."""

    before: np.ndarray
    busy: np.ndarray
    backward: np.ndarray
    kept: np.ndarray
    parameters: np.ndarray
    trained: np.ndarray
    reduced: np.ndarray
    transient: np.ndarray
    limit: np.ndarray
    devices: tuple[str, ...]
    machines: tuple[Machine, ...]


def _layout(completion: Completion) -> _Layout:
    segments, work = completion.layers.segments, completion.work
    number: dict[tuple[int, bool], int] = {}
    distinct: list[int] = []
    counts = np.zeros((completion.layers.count, len(segments)))
    for i, segment in enumerate(segments):
        key = (id(work[i]), segment.is_block)
        if key not in number:
            number[key] = len(distinct)
            distinct.append(i)
        counts[segment.layer, number[key]] += 1
    tied = (
        (reader, c.layer, numel, numel if c.has_gradient else 0)
        for c in completion.crossings
        if c.value.kind == "param"
        for numel in [c.value.local_numel(completion.mesh, 1.0)]
        for reader in c.readers
    )
    return _Layout(tuple(distinct), counts[:, : len(distinct)], tuple(tied))


@lru_cache(maxsize=4096)
def _starts(layers: int, parts: int) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(even_split(layers, parts))[:-1]))


@lru_cache(maxsize=65536)
def _in_flight(schedule: Schedule, stages: int, micro_batches: int, chunks: int) -> np.ndarray:
    return np.array([in_flight(schedule, s, stages, micro_batches, chunks) for s in range(stages)], float)
