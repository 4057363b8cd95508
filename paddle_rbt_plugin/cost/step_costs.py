"""What a step costs each stage beside its micro steps, and what the stage needs of its device.

From ``StepCosts`` follow both the least time of a step, which is a closed form, and the estimate, which simulates the schedule.
For p stages of v chunks, with f and b the times of a forward and a backward pass through one chunk (the sending included) and m
micro batches,

    step >= max over stages s of ( sum over i < s of (f_i0 + b_i0) + m * sum over chunks c of (f_sc + b_sc) )
            + max over stages of (gradient synchronisation + update)

since stage s starts when the first micro batch has come through the stages before it, is busy with m of them, and its last
gradient still goes back through those stages. With equal stages and FThenB or 1F1B this is the step itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from paddle_rbt_plugin.cost.candidate import Candidate, Schedule, Training
from paddle_rbt_plugin.cost.communication import collective_seconds
from paddle_rbt_plugin.cost.memory import gradient_itemsize, state_bytes
from paddle_rbt_plugin.cost.pipeline import in_flight
from paddle_rbt_plugin.cost.segment_table import MESSAGE, REVIVED, TEMPORARY
from paddle_rbt_plugin.cost.stage_costs import Part, StageCosts
from paddle_rbt_plugin.cost.table import CostTable
from paddle_rbt_plugin.cost.update import exposed_seconds, gradient_sync_seconds, update_seconds


class StageStates:
    """The training states of stages, and what it takes to synchronise and update them once per step. Of a candidate only its
    cut and what ZeRO splits counts. Arrays have an entry per stage."""

    def __init__(self, costs: StageCosts, candidate: Candidate, table: CostTable):
        self._costs = costs
        self._candidate = candidate
        self._training = table.training
        self._constants = c = table.constants
        states = [state_bytes(p.parameters, p.trained, candidate, self._training, p.mesh.degree("dp")) for p in costs.parts]
        self.memory: Mapping[str, np.ndarray] = {
            purpose: sum((getattr(s, purpose) for s in states), np.zeros(costs.cut.stages))
            for purpose in ("parameters", "master_weights", "gradients", "optimizer_states")
        }
        """Bytes by purpose."""
        self.bucket, self.update, self._others = np.zeros((3, costs.cut.stages))
        self._syncs: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        if self._training.mode == "train":
            reduced = sum((p.trained for p in costs.parts if p.mesh.degree("dp") > 1), self.bucket)
            self.bucket = np.minimum(c.bucket_bytes, reduced * gradient_itemsize(self._training))
            self.update = sum((self._update_seconds(p) for p in costs.parts), self.update)
            self._others = sum((self._reduction_along_mp(p) for p in costs.parts), self._exchange_seconds(table))
            self._syncs = [self._reduction_along_dp(p) for p in costs.parts]
        self.bytes: np.ndarray = sum(self.memory.values()) + self.bucket
        """Of the states, and of the buffer that gradients are sent in (``bucket``)."""

    def sync_seconds(self, steps: np.ndarray, backward: np.ndarray) -> np.ndarray:
        """Seconds of gradient synchronisation that no backward pass hides, for so many micro batches a step, whose backward
        passes take so long; micro batches x stages."""
        found = np.broadcast_to(self._others, backward.shape)
        for nbytes, once, each in self._syncs:
            seconds = once + each * steps[:, None]
            if self._training.overlap_gradients:
                seconds = exposed_seconds(seconds, nbytes, backward, self._constants)
            found = found + seconds
        return found

    def _update_seconds(self, part: Part) -> np.ndarray:
        shards = self._candidate.shards(part.mesh.degree("dp"))
        seconds = [update_seconds(1.0, self._training, m.device, self._constants) for m in part.machines]
        return part.trained / shards * np.array(seconds)

    def _reduction_along_mp(self, part: Part) -> np.ndarray:
        nbytes, found = part.reduced["mp"] * gradient_itemsize(self._training), np.zeros(len(part.machines))
        for s in np.flatnonzero(nbytes):
            net = part.machines[s].network("mp")
            if net is not None:
                found[s] = collective_seconds("all_reduce", nbytes[s], net, self._constants)
        return found

    def _reduction_along_dp(self, part: Part) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bytes of gradients, and seconds to reduce them once per step and in every micro batch."""
        nbytes, shards = part.reduced["dp"] * gradient_itemsize(self._training), self._candidate.shards(part.mesh.degree("dp"))
        once, each = np.zeros((2, len(nbytes)))
        for machine in dict.fromkeys(part.machines):
            here = np.array([m is machine for m in part.machines])
            once[here], each[here] = gradient_sync_seconds(
                nbytes[here], self._candidate.sharding_stage, shards, machine.network("dp"), self._constants
            )
        return nbytes, once, each

    def _exchange_seconds(self, table: CostTable) -> np.ndarray:
        """Gradients of parameters that lie on two stages: one message, for the sum, and one back with it. Under ZeRO each
        replica exchanges its part."""
        found, ranks = np.zeros(self._costs.cut.stages), self._costs.mesh.size
        for exchange in self._costs.exchanges:
            nbytes = exchange.elements * gradient_itemsize(self._training) / self._candidate.shards(exchange.dp)
            for here, there in (exchange.stages, exchange.stages[::-1]):
                net = table.machines.pair(here * ranks, there * ranks)
                found[here] += 2 * collective_seconds("p2p", nbytes, net, self._constants)
        return found


class PipelineCosts:
    """Micro batches through the pipeline, for candidates that differ in their micro batches only: of ``steps`` of them each.
    Arrays are of candidates, or of candidates x stages."""

    def __init__(self, stages: StageCosts, schedule: Schedule, steps: tuple[int, ...], training: Training):
        self.stages = stages
        self.steps = np.array(steps, float)
        self.least_seconds: np.ndarray = (stages.before + self.steps[:, None] * stages.busy).max(1)
        """No less do they take, whatever the order of passes, per candidate."""
        pp, train = stages.cut.stages, training.mode == "train"
        self.memory: Mapping[str, np.ndarray] = {
            "activations": (_in_flight(schedule, pp, steps, stages.cut.chunks) if train else 0.0) * stages.kept,
            "recomputed": stages.largest[..., REVIVED],
            "temporaries": stages.largest[..., TEMPORARY],
            "communication": stages.largest[..., MESSAGE],
        }
        """Bytes by purpose, without buffers for gradients."""
        self.bytes: np.ndarray = sum(self.memory.values(), np.zeros(1))


class StepCosts:
    """Whole steps of the same candidates."""

    def __init__(self, pipeline: PipelineCosts, states: StageStates):
        self.pipeline = pipeline
        self.gradient_sync = states.sync_seconds(pipeline.steps, pipeline.stages.backward_alone)
        """Seconds of gradient synchronisation that no backward pass hides."""
        self.update = states.update
        """Seconds of clipping and optimizer, per stage."""
        self.closing_seconds: np.ndarray = (self.gradient_sync + self.update).max(1)
        """What the slowest stage does once, behind its micro batches, per candidate."""
        self.least_seconds: np.ndarray = pipeline.least_seconds + self.closing_seconds
        """No less does a step take, per candidate."""
        self.peak: np.ndarray = states.bytes + pipeline.bytes
        """Bytes that the device of each stage needs."""
        self._states = states

    def memory(self) -> dict[str, np.ndarray]:
        """Bytes by purpose, see ``Estimate.memory``; what they are made of adds up to the peak."""
        found = {**self._states.memory, **self.pipeline.memory}
        found["communication"] = found["communication"] + self._states.bucket
        return found


@lru_cache(maxsize=65536)
def _in_flight(schedule: Schedule, stages: int, steps: tuple[int, ...], chunks: int) -> np.ndarray:
    return np.array([[in_flight(schedule, s, stages, m, chunks) for s in range(stages)] for m in steps], float)
