"""Cost of a pipeline stage: its segments put together, what it sends to its neighbours, its update and its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from paddle_rbt_plugin.cluster import Device, ProcessMesh
from paddle_rbt_plugin.completion.work import Completion, SegmentWork
from paddle_rbt_plugin.cost.candidate import Candidate, Recompute
from paddle_rbt_plugin.cost.communication import collective_seconds
from paddle_rbt_plugin.cost.constants import Constants
from paddle_rbt_plugin.cost.memory import gradient_itemsize, state_bytes
from paddle_rbt_plugin.cost.pipeline import in_flight
from paddle_rbt_plugin.cost.segments import PassCost, SegmentCost
from paddle_rbt_plugin.cost.shared import SharedCosts
from paddle_rbt_plugin.cost.sizes import Sizes
from paddle_rbt_plugin.cost.stages import Stage
from paddle_rbt_plugin.cost.update import exposed_seconds, gradient_sync_seconds, update_seconds


@dataclass(frozen=True)
class LayerStrategy:
    """How one layer runs: completed on a mesh of its stage's devices, which may be arranged otherwise than for its
    neighbours, and with its own recomputation."""

    completion: Completion
    recompute: Recompute


@dataclass(frozen=True)
class StageCost:
    """One stage: passes of a micro batch chunk by chunk, and what it does once per step. Bytes are per device."""

    stage: Stage
    device: Device
    forward: tuple[PassCost, ...]
    recompute: tuple[PassCost, ...]
    backward: tuple[PassCost, ...]
    send_ahead: tuple[float, ...]
    """Per chunk, seconds in which it sends what other stages read of it."""
    send_back: tuple[float, ...]
    """Per chunk, seconds in which it sends gradients back."""
    parameters: float
    """Elements on one device, before ZeRO splits them."""
    gradient_sync: float
    """Seconds of gradient synchronisation that no backward pass hides."""
    update: float
    """Seconds of clipping and optimizer."""
    memory: Mapping[str, float]

    def forward_seconds(self, c: Constants) -> tuple[float, ...]:
        """Per chunk, one forward pass with the sending of its result."""
        return tuple(p.seconds(c) + send for p, send in zip(self.forward, self.send_ahead, strict=True))

    def backward_seconds(self, c: Constants) -> tuple[float, ...]:
        """Per chunk, one backward pass with its recomputation and the sending of its gradient."""
        passes = zip(self.recompute, self.backward, self.send_back, strict=True)
        return tuple((r + b).seconds(c) + send for r, b, send in passes)

    def busy_seconds(self, c: Constants) -> float:
        """One micro batch through all chunks, forward and backward."""
        return sum(self.forward_seconds(c)) + sum(self.backward_seconds(c))


@dataclass
class _Part:
    """What of a stage runs on one mesh: elements of its parameters on one device, of those that are trained, and of the
    gradients to reduce per axis."""

    mesh: ProcessMesh
    parameters: float = 0.0
    trained: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Alike:
    """What stages of the same work on the same machines share."""

    segments: list[SegmentCost]
    forward: tuple[PassCost, ...]
    recompute: tuple[PassCost, ...]
    backward: tuple[PassCost, ...]
    parts: list[_Part]
    gradient_sync: float
    update: float


class StageCosting:
    """Costs the stages of one candidate. ``layers`` says where layers differ from the candidate (level o2)."""

    def __init__(
        self,
        completion: Completion,
        candidate: Candidate,
        stages: Sequence[Stage],
        shared: SharedCosts,
        layers: Sequence[LayerStrategy] | None = None,
    ):
        self.completion = completion
        self.candidate = candidate
        self.shared = shared
        self.cluster = shared.cluster
        self.training = shared.training
        self.train = shared.training.mode == "train"
        self.stages = len(stages)
        self.ranks = completion.mesh.size
        self.samples = candidate.micro_batch * completion.mesh.degree("dp")
        self.c = shared.constants
        same = LayerStrategy(completion, candidate.recompute)
        self.strategies = tuple(layers) if layers else (same,) * completion.layers.count
        chunks = sorted(chunk for stage in stages for chunk in stage.layers)
        chunk_layers = tuple(last - first + 1 for first, last in chunks)
        of_layer = [s.completion for s in self.strategies] if layers else None
        self.sends = shared.sends(completion, candidate, chunk_layers, of_layer)
        self._known: dict[tuple[object, ...], _Alike] = {}

    def cost(self, stage: Stage) -> StageCost:
        """The cost of a stage on the ranks that it runs on."""
        device, machine = self.shared.machine(self.completion.mesh, stage.index * self.ranks)
        work = tuple(tuple(id(self._work(i)) for i in chunk) for chunk in stage.chunks)
        meshes = tuple(id(self._strategy(i)) for i in stage.segments) if len(set(map(id, self.strategies))) > 1 else ()
        key = (id(machine), work, meshes, tuple(c.value.name for c in stage.shared))
        if key not in self._known:
            self._known[key] = self._alike(stage)
        alike = self._known[key]
        return StageCost(
            stage=stage,
            device=device,
            forward=alike.forward,
            recompute=alike.recompute,
            backward=alike.backward,
            send_ahead=self.sends.ahead[stage.index :: self.stages],
            send_back=self.sends.back[stage.index :: self.stages],
            parameters=sum(p.parameters for p in alike.parts),
            gradient_sync=alike.gradient_sync + self._exchange_seconds(stage),
            update=alike.update,
            memory=self._memory(stage, alike.segments, alike.parts),
        )

    def _alike(self, stage: Stage) -> _Alike:
        """What a stage costs wherever it lies in the pipeline."""
        first = stage.index * self.ranks
        chunks = [[self._segment(i, first) for i in chunk] for chunk in stage.chunks]
        moves = [self._moves(chunk, first) for chunk in stage.chunks]
        backward = tuple(
            sum((s.backward for s in chunk), PassCost(regrouping=back)) for chunk, (_, back) in zip(chunks, moves, strict=True)
        )
        parts = self._parts(stage)
        seconds = sum(p.seconds(self.c) for p in backward)
        return _Alike(
            segments=[s for chunk in chunks for s in chunk],
            forward=tuple(
                sum((s.forward for s in chunk), PassCost(regrouping=ahead))
                for chunk, (ahead, _) in zip(chunks, moves, strict=True)
            ),
            recompute=tuple(sum((s.recompute for s in chunk), PassCost()) for chunk in chunks),
            backward=backward,
            parts=parts,
            gradient_sync=sum(self._sync_seconds(p, first, seconds) for p in parts) if self.train else 0.0,
            update=sum(self._update_seconds(p, first) for p in parts) if self.train else 0.0,
        )

    def _strategy(self, index: int) -> LayerStrategy:
        return self.strategies[self.completion.layers.segments[index].layer]

    def _work(self, index: int) -> SegmentWork:
        return self._strategy(index).completion.work[index]

    def _segment(self, index: int, first: int) -> SegmentCost:
        strategy = self._strategy(index)
        _, machine = self.shared.machine(strategy.completion.mesh, first)
        is_block = self.completion.layers.segments[index].is_block
        candidate = self.candidate
        if strategy.recompute != candidate.recompute:
            candidate = replace(candidate, recompute=strategy.recompute)
        sizes = self._sizes(index)
        return self.shared.segment(strategy.completion.work[index], is_block, machine, sizes, candidate)

    def _sizes(self, index: int) -> Sizes:
        completion = self._strategy(index).completion
        scale = self.samples / completion.batch
        return self.shared.sizes(completion.work[index], completion.mesh, scale, self.candidate.sequence_parallel)

    def _moves(self, chunk: Sequence[int], first: int) -> tuple[float, float]:
        """Seconds forward and backward to bring hidden states from a layer to the next one on another mesh."""
        ahead = back = 0.0
        for before, after in pairwise(chunk):
            old, new = (self._strategy(i).completion.mesh.degree("dp") for i in (before, after))
            if old != new:
                nbytes = max(boundary_bytes(self._work(i), self._sizes(i)) for i in (before, after))
                seconds = self.shared.regroup_seconds(nbytes, old, new, self.ranks, first)
                ahead, back = (ahead + seconds, back) if new < old else (ahead, back + seconds)
        return ahead, back

    def _parts(self, stage: Stage) -> list[_Part]:
        """The stage's segments by the mesh that they run on, with their parameters."""
        parts: dict[int, _Part] = {}
        for i in stage.segments:
            completion = self._strategy(i).completion
            part = parts.setdefault(completion.mesh.degree("dp"), _Part(completion.mesh))
            sizes = self._sizes(i)
            part.parameters += sum(map(sizes.numel, completion.work[i].params))
            part.trained += sum(map(sizes.numel, completion.work[i].trained))
            for sync in completion.work[i].gradient_syncs:
                part.gradients[sync.axis] = part.gradients.get(sync.axis, 0.0) + sizes.numel(sync.value)
        if self.training.own_copies:
            part = parts[self._strategy(stage.segments[-1]).completion.mesh.degree("dp")]
            for c in stage.shared:
                numel = c.value.local_numel(self.completion.mesh, 1.0)
                part.parameters += numel
                part.trained += numel if c.has_gradient else 0
        return list(parts.values())

    def _sync_seconds(self, part: _Part, first: int, backward: float) -> float:
        """Gradients of the stage's parameters, brought to where the parameters lie."""
        seconds = 0.0
        _, machine = self.shared.machine(part.mesh, first)
        for axis, net in machine.networks.items():
            nbytes = part.gradients.get(axis, 0) * gradient_itemsize(self.training)
            if axis != "dp":
                seconds += collective_seconds("all_reduce", nbytes, net, self.c) if nbytes else 0.0
                continue
            sync_s = gradient_sync_seconds(nbytes, self.candidate, net, self.c)
            seconds += exposed_seconds(sync_s, nbytes, backward, self.c) if self.training.overlap_gradients else sync_s
        return seconds

    def _exchange_seconds(self, stage: Stage) -> float:
        """Gradients of parameters that lie on other stages too: one message there, for the sum, and one back with it. Under
        ZeRO each replica exchanges its part."""
        if not self.train or self.training.own_copies:
            return 0.0
        seconds = 0.0
        for crossing, other in stage.exchanged:
            completion = self.strategies[crossing.layer].completion
            shards = self.candidate.shards(completion.mesh.degree("dp"))
            numel = crossing.value.local_numel(self.completion.mesh, 1.0)
            nbytes = numel * gradient_itemsize(self.training) / shards
            net = self.shared.pair(stage.index * self.ranks, other * self.ranks)
            seconds += 2 * collective_seconds("p2p", nbytes, net, self.c)
        return seconds

    def _update_seconds(self, part: _Part, first: int) -> float:
        _, machine = self.shared.machine(part.mesh, first)
        shards = self.candidate.shards(part.mesh.degree("dp"))
        return update_seconds(part.trained / shards, self.training, machine.device, self.c)

    def _memory(self, stage: Stage, segments: list[SegmentCost], parts: Sequence[_Part]) -> dict[str, float]:
        states = [state_bytes(p.parameters, p.trained, self.candidate, self.training, p.mesh.degree("dp")) for p in parts]
        schedule, m = self.candidate.schedule, self.candidate.accumulate_steps
        flying = in_flight(schedule, stage.index, self.stages, m, len(stage.chunks)) if self.train else 0
        reduced = sum(p.trained for p in parts if p.mesh.degree("dp") > 1) if self.train else 0
        bucket = min(self.c.bucket_bytes, reduced * gradient_itemsize(self.training))
        return {
            "parameters": sum(s.parameters for s in states),
            "master_weights": sum(s.master_weights for s in states),
            "gradients": sum(s.gradients for s in states),
            "optimizer_states": sum(s.optimizer_states for s in states),
            "activations": flying * (sum(s.kept for s in segments) + self.sends.received[stage.index]),
            "recomputed": max(s.revived for s in segments) if self.train else 0.0,
            "temporaries": max(s.temporary for s in segments),
            "communication": max(s.message for s in segments) + bucket,
        }


def boundary_bytes(work: SegmentWork, sizes: Sizes) -> float:
    """Bytes of the hidden state that a segment hands on, per rank, the sequence unsplit."""
    return sum(sizes.nbytes(v) for v in work.outputs if v.is_activation)
