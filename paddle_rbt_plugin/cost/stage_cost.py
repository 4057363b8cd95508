"""Cost of a pipeline stage: its segments put together, what it sends to its neighbours, its update and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paddle_rbt_plugin.cluster import Cluster, Device, ProcessMesh
from paddle_rbt_plugin.completion.work import Completion, SegmentWork, Value
from paddle_rbt_plugin.cost.candidate import Candidate, Training
from paddle_rbt_plugin.cost.communication import GroupNetwork, collective_seconds, group_network
from paddle_rbt_plugin.cost.compute import ComputeDevice
from paddle_rbt_plugin.cost.constants import Constants
from paddle_rbt_plugin.cost.memory import gradient_itemsize, state_bytes
from paddle_rbt_plugin.cost.pipeline import in_flight
from paddle_rbt_plugin.cost.segments import Machine, PassCost, SegmentCost, segment_cost
from paddle_rbt_plugin.cost.sizes import Sizes, loss_values
from paddle_rbt_plugin.cost.stages import Stage
from paddle_rbt_plugin.cost.update import exposed_seconds, gradient_sync_seconds, update_seconds


@dataclass(frozen=True)
class StageCost:
    """One stage: passes of a micro batch chunk by chunk, and what it does once per step. Bytes are per device."""

    stage: Stage
    device: Device
    forward: tuple[PassCost, ...]
    recompute: tuple[PassCost, ...]
    backward: tuple[PassCost, ...]
    send: float
    """Seconds to hand a boundary tensor to a neighbour, in either direction."""
    parameters: int
    """Elements on one device, before ZeRO splits them."""
    gradient_sync: float
    """Seconds of gradient synchronisation that no backward pass hides."""
    update: float
    """Seconds of clipping and optimizer."""
    memory: Mapping[str, float]

    def forward_seconds(self, c: Constants) -> tuple[float, ...]:
        """Per chunk, one forward pass with the sending of its result."""
        return tuple(p.seconds(c) + self.send for p in self.forward)

    def backward_seconds(self, c: Constants) -> tuple[float, ...]:
        """Per chunk, one backward pass with its recomputation and the sending of its gradient."""
        return tuple((r + b).seconds(c) + self.send for r, b in zip(self.recompute, self.backward, strict=True))

    def busy_seconds(self, c: Constants) -> float:
        """One micro batch through all chunks, forward and backward."""
        return sum(self.forward_seconds(c)) + sum(self.backward_seconds(c))


class StageCosting:
    """Costs the stages of one candidate; equal segments on equal machines once."""

    def __init__(
        self, completion: Completion, candidate: Candidate, cluster: Cluster, training: Training, stages: int, c: Constants
    ):
        self.completion = completion
        self.mesh = completion.mesh
        self.candidate = candidate
        self.cluster = cluster
        self.training = training
        self.train = training.mode == "train"
        self.stages = stages
        self.c = c
        self._sizes: dict[int, Sizes] = {}
        self._segments: dict[tuple[object, ...], SegmentCost] = {}

    def cost(self, stage: Stage) -> StageCost:
        """The cost of a stage on the ranks that it runs on."""
        first = stage.index * self.mesh.size
        kind = self.cluster.group_of(first)
        device = ComputeDevice(kind.device.flops(self.training.precision), kind.device.memory_bandwidth)
        machine = Machine(device, networks(self.mesh, first, self.cluster), self.c)
        chunks = [[self._segment(i, machine) for i in chunk] for chunk in stage.chunks]
        parameters = sum(self._numel(i, v) for i in stage.segments for v in self.completion.work[i].params)
        parameters += sum(self._numel(stage.segments[0], v) for v in stage.shared)
        backward = tuple(sum((s.backward for s in chunk), PassCost()) for chunk in chunks)
        dp = machine.networks["dp"].ranks if "dp" in machine.networks else 1
        return StageCost(
            stage=stage,
            device=kind.device,
            forward=tuple(sum((s.forward for s in chunk), PassCost()) for chunk in chunks),
            recompute=tuple(sum((s.recompute for s in chunk), PassCost()) for chunk in chunks),
            backward=backward,
            send=self._send_seconds(stage, machine),
            parameters=parameters,
            gradient_sync=self._sync_seconds(stage, machine, sum(p.seconds(self.c) for p in backward)) if self.train else 0.0,
            update=self._update_seconds(parameters, dp, device) if self.train else 0.0,
            memory=self._memory(stage, [s for chunk in chunks for s in chunk], parameters, dp),
        )

    def _segment(self, index: int, machine: Machine) -> SegmentCost:
        work, is_block = self.completion.work[index], self.completion.layers.segments[index].is_block
        key = (id(work), is_block, machine.device, *machine.networks.values())
        if key not in self._segments:
            self._segments[key] = segment_cost(
                work, self._sizes_of(work), machine, self.candidate.recompute, is_block, self.training.fused_attention
            )
        return self._segments[key]

    def _sizes_of(self, work: SegmentWork) -> Sizes:
        if id(work) not in self._sizes:
            batch_scale = self.candidate.micro_batch * self.mesh.degree("dp") / self.completion.batch
            self._sizes[id(work)] = Sizes(
                self.mesh, batch_scale, self.training.precision, self.candidate.sequence_parallel, loss_values(work.forward)
            )
        return self._sizes[id(work)]

    def _numel(self, index: int, value: Value) -> int:
        return self._sizes_of(self.completion.work[index]).numel(value)

    def _send_seconds(self, stage: Stage, machine: Machine) -> float:
        """Each rank of an mp group sends its part of the hidden state, the receivers gather it over the links inside their
        machine (arXiv 2104.04473, section 4.1)."""
        if self.stages == 1:
            return 0.0
        segments = self.completion.layers.segments
        last = [i for i in stage.segments if segments[i].is_block or i == stage.segments[-1]][-1]
        work = self.completion.work[last]
        whole = sum(self._sizes_of(work).nbytes(v) for v in work.outputs if v.kind == "var" and v.batch_dim is not None)
        here = stage.index * self.mesh.size
        there = here + self.mesh.size if stage.index < self.stages - 1 else here - self.mesh.size
        net = group_network(self.cluster, (here, there))
        mp = machine.networks.get("mp")
        if mp is None or mp.ranks == 1:
            return collective_seconds("p2p", whole, net, self.c)
        seconds = collective_seconds("p2p", whole / mp.ranks, net, self.c)
        return seconds if self.candidate.sequence_parallel else seconds + collective_seconds("all_gather", whole, mp, self.c)

    def _sync_seconds(self, stage: Stage, machine: Machine, backward: float) -> float:
        """Gradients of the stage's parameters, brought to where the parameters lie."""
        seconds = 0.0
        for axis, net in machine.networks.items():
            numel = sum(
                self._numel(i, sync.value)
                for i in stage.segments
                for sync in self.completion.work[i].gradient_syncs
                if sync.axis == axis
            )
            nbytes = numel * gradient_itemsize(self.training)
            if axis != "dp":
                seconds += collective_seconds("all_reduce", nbytes, net, self.c) if nbytes else 0.0
                continue
            sync_s = gradient_sync_seconds(nbytes, self.candidate, net, self.c)
            seconds += exposed_seconds(sync_s, nbytes, backward, self.c) if self.training.overlap_gradients else sync_s
        return seconds

    def _update_seconds(self, parameters: int, dp: int, device: ComputeDevice) -> float:
        return update_seconds(parameters / (dp if self.candidate.sharding_stage else 1), self.training, device, self.c)

    def _memory(self, stage: Stage, segments: list[SegmentCost], parameters: int, dp: int) -> dict[str, float]:
        states = state_bytes(parameters, self.candidate, self.training, dp)
        schedule, m = self.candidate.schedule, self.candidate.accumulate_steps
        flying = in_flight(schedule, stage.index, self.stages, m, len(stage.chunks)) if self.train else 0
        bucket = min(self.c.bucket_bytes, parameters * gradient_itemsize(self.training)) if dp > 1 and self.train else 0.0
        return {
            "parameters": states.parameters,
            "master_weights": states.master_weights,
            "gradients": states.gradients,
            "optimizer_states": states.optimizer_states,
            "activations": flying * sum(s.kept for s in segments),
            "recomputed": max(s.revived for s in segments) if self.train else 0.0,
            "temporaries": max(s.temporary for s in segments),
            "communication": max(s.message for s in segments) + bucket,
        }


def networks(mesh: ProcessMesh, first: int, cluster: Cluster) -> dict[str, GroupNetwork]:
    """The network of each axis of the mesh when its first rank is ``first``."""
    shift = first - mesh.ranks[0]
    return {axis: group_network(cluster, tuple(r + shift for r in mesh.group(axis))) for axis in mesh.axes}
