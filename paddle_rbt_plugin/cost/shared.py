"""What the candidates of one search share: equal work on equal machines with equal local sizes is costed once.

A segment's cost depends on its work (which names the mesh axes, not their sizes), on the samples
that a rank holds, on recomputation and sequence parallelism, and on the device and the networks that its collectives use.
Thousands of candidates differ in nothing of this for most of their segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from paddle_rbt_plugin.cluster import Cluster, Device, MachineGroup, ProcessMesh
from paddle_rbt_plugin.completion.work import Completion, SegmentWork
from paddle_rbt_plugin.cost.candidate import Candidate, Training
from paddle_rbt_plugin.cost.communication import GroupNetwork, collective_seconds, group_network
from paddle_rbt_plugin.cost.compute import ComputeDevice, products
from paddle_rbt_plugin.cost.constants import DEFAULT, Constants, constants_on
from paddle_rbt_plugin.cost.segments import Machine, SegmentCost, segment_cost
from paddle_rbt_plugin.cost.sizes import Sizes, loss_values
from paddle_rbt_plugin.cost.transfers import Path, Routes, Sends, routes


class SharedCosts:
    """Costs of segments for one cluster and one training. Keeps the work it has seen alive, since it knows it by identity."""

    def __init__(self, cluster: Cluster, training: Training, constants: Constants = DEFAULT):
        self.cluster = cluster
        self.training = training
        self.constants = constants_on(cluster.groups, constants)
        self._stated = constants
        self._works: dict[int, SegmentWork] = {}
        self._axes: dict[int, tuple[frozenset[str], bool]] = {}
        self._flop: dict[int, float] = {}
        self._sizes: dict[tuple[object, ...], Sizes] = {}
        self._segments: dict[tuple[object, ...], SegmentCost] = {}
        self._machines: dict[tuple[object, ...], tuple[Device, Machine]] = {}
        self._sends: dict[tuple[object, ...], tuple[Completion, Sends]] = {}
        self._known_routes: dict[tuple[object, ...], Routes] = {}
        self._crossings: dict[tuple[object, ...], tuple[Completion, np.ndarray, np.ndarray]] = {}
        self._pairs: dict[tuple[int, int], GroupNetwork] = {}
        self._groups_of_parts: dict[tuple[int, int, int], GroupNetwork] = {}

    def machine(self, mesh: ProcessMesh, first: int) -> tuple[Device, Machine]:
        """What a stage on ``mesh``, moved to begin at rank ``first``, runs on; the slowest and smallest of its devices where
        they differ."""
        key = (mesh.axes, mesh.shape, *self._place(first, mesh.size))
        if key not in self._machines:
            groups = self._groups(first, mesh.size)
            precision = self.training.precision
            device = min((g.device for g in groups), key=lambda d: d.flops(precision))
            bandwidth = min(g.device.memory_bandwidth for g in groups)
            device = replace(device, memory=min(g.device.memory for g in groups), memory_bandwidth=bandwidth)
            compute = ComputeDevice(device.flops(precision), bandwidth)
            constants = constants_on(groups, self._stated)
            self._machines[key] = device, Machine(compute, networks(mesh, first, self.cluster), constants)
        return self._machines[key]

    def on(self, cluster: Cluster) -> SharedCosts:
        """Costs for another order of the cluster's groups, which know what these know of segments."""
        other = SharedCosts(cluster, self.training, self._stated)
        other._works, other._axes, other._flop = self._works, self._axes, self._flop
        other._sizes, other._segments = self._sizes, self._segments
        return other

    def _groups(self, first: int, size: int) -> list[MachineGroup]:
        found, start = [], 0
        for group in self.cluster.groups:
            if start < first + size and first < start + group.device_count:
                found.append(group)
            start += group.device_count
        return found or [self.cluster.group_of(first)]

    def _place(self, first: int, size: int) -> tuple[int, ...]:
        """Equal for runs of ranks that lie alike in equal machines."""
        if self.cluster.is_homogeneous:
            return (first % self.cluster.groups[0].devices_per_machine,)
        start = 0
        for i, group in enumerate(self.cluster.groups):
            if start <= first and first + size <= start + group.device_count:
                return i, (first - start) % group.devices_per_machine
            start += group.device_count
        return first, size, -1

    def pair(self, here: int, there: int) -> GroupNetwork:
        """The network between two ranks."""
        if (here, there) not in self._pairs:
            self._pairs[here, there] = group_network(self.cluster, (here, there))
        return self._pairs[here, there]

    def regroup_seconds(self, nbytes: float, old: int, new: int, ranks: int, first: int) -> float:
        """Seconds to bring a tensor of ``nbytes`` per rank, where fewer ranks share the batch, from ``old`` data-parallel
        parts to ``new`` or back: what was one part of several is gathered, the way round it is cut for nothing."""
        parts, stride = max(old, new) // min(old, new), ranks // max(old, new)
        key = (first % self.cluster.groups[0].devices_per_machine if self.cluster.is_homogeneous else first, parts, stride)
        if key not in self._groups_of_parts:
            group = tuple(first + k * stride for k in range(parts))
            self._groups_of_parts[key] = group_network(self.cluster, group)
        return collective_seconds("all_gather", nbytes, self._groups_of_parts[key], self.constants)

    def sends(
        self,
        completion: Completion,
        candidate: Candidate,
        chunk_layers: tuple[int, ...],
        of_layer: Sequence[Completion] | None = None,
    ) -> Sends:
        """What the stages send each other; ``chunk_layers`` as in ``routes``. ``of_layer`` holds the completion of each layer
        where they differ."""
        if of_layer is not None:
            return self._sum_sends(completion, candidate, self._routes(completion, candidate, chunk_layers, of_layer), of_layer)
        same = (completion,) * completion.layers.count
        mesh, strategy = completion.mesh, (candidate.pp, candidate.sequence_parallel)
        cut: tuple[object, ...] = (id(completion.crossings), mesh.axes, mesh.shape, chunk_layers, *strategy)
        key = (*cut, candidate.micro_batch)
        if key not in self._sends:
            if cut not in self._known_routes:
                self._known_routes[cut] = self._routes(completion, candidate, chunk_layers, same)
            self._sends[key] = completion, self._sum_sends(completion, candidate, self._known_routes[cut], same)
        return self._sends[key][1]

    def _sum_sends(self, completion: Completion, candidate: Candidate, found: Routes, of_layer: Sequence[Completion]) -> Sends:
        nbytes = self._sent_bytes(completion, candidate, of_layer)
        return found.sends(nbytes, partial(self._sending, completion, candidate, of_layer))

    def _sent_bytes(self, completion: Completion, candidate: Candidate, of_layer: Sequence[Completion]) -> np.ndarray:
        """Bytes on one rank of each crossing as the completion of its layer has it."""
        found = {id(c): self._crossing_bytes(c, candidate) for c in {id(c): c for c in of_layer}.values()}
        if len(found) == 1:
            return next(iter(found.values()))
        return np.array([found[id(of_layer[c.layer])][i] for i, c in enumerate(completion.crossings)], float)

    def _crossing_bytes(self, completion: Completion, candidate: Candidate) -> np.ndarray:
        """Bytes on one rank of all crossings of a completion: linear in the micro batch for what grows with the batch."""
        mesh = completion.mesh
        key = (id(completion.crossings), mesh.axes, mesh.shape, candidate.sequence_parallel)
        if key not in self._crossings:
            sizes = Sizes(mesh, mesh.degree("dp") / completion.batch, self.training.precision, candidate.sequence_parallel)
            of_one = np.array([sizes.stored(c.value) for c in completion.crossings], float)
            grows = np.array([c.value.batch_dim is not None for c in completion.crossings], bool)
            self._crossings[key] = completion, of_one, grows
        _, of_one, grows = self._crossings[key]
        samples = candidate.micro_batch
        return np.where(grows, samples, 1) * of_one

    def _routes(
        self, completion: Completion, candidate: Candidate, chunk_layers: tuple[int, ...], of_layer: Sequence[Completion]
    ) -> Routes:
        ranks = completion.mesh.size
        first: dict[tuple[object, ...], Path] = {}

        def path_of(layer: int, source: int, target: int) -> Path:
            mp = self._part_network(of_layer[layer], candidate, source * ranks)
            return first.setdefault((self.pair(source * ranks, target * ranks), mp), (layer, source, target))

        return routes(completion, chunk_layers, candidate.pp, self.training.own_copies, path_of)

    def _part_network(self, completion: Completion, candidate: Candidate, first: int) -> GroupNetwork | None:
        """Where each rank of an mp group sends a part of a hidden state, the group that gathers the parts."""
        if not self.training.own_copies or candidate.sequence_parallel:
            return None
        mp = self.machine(completion.mesh, first)[1].networks.get("mp")
        return None if mp is None or mp.ranks == 1 else mp

    def _sending(
        self, completion: Completion, candidate: Candidate, of_layer: Sequence[Completion], nbytes: np.ndarray, path: Path
    ) -> np.ndarray:
        layer, source, target = path
        ranks = completion.mesh.size
        net, mp = self.pair(source * ranks, target * ranks), self._part_network(of_layer[layer], candidate, source * ranks)
        if mp is None:
            return collective_seconds("p2p", nbytes, net, self.constants)
        # Each rank sends its part, the receivers gather it (arXiv 2104.04473, section 4.1).
        part = collective_seconds("p2p", nbytes / mp.ranks, net, self.constants)
        return part + collective_seconds("all_gather", nbytes, mp, self.constants)

    def sizes(self, work: SegmentWork, mesh: ProcessMesh, batch_scale: float, sequence_parallel: bool) -> Sizes:
        """Local sizes of the values of a segment. ``batch_scale`` is as in ``Value.local_shape``."""
        _, spread = self._use_of_axes(work, mesh)
        dp = mesh.degree("dp")
        key = (id(work), mesh.degree("mp"), dp if spread else 0, batch_scale / dp, sequence_parallel)
        if key not in self._sizes:
            float32 = loss_values(work.forward)
            self._sizes[key] = Sizes(mesh, batch_scale, self.training.precision, sequence_parallel, float32)
        return self._sizes[key]

    def segment(self, work: SegmentWork, is_block: bool, machine: Machine, sizes: Sizes, candidate: Candidate) -> SegmentCost:
        """Cost of a segment, see ``segment_cost``; of the candidate only recomputation counts beside the sizes."""
        axes, _ = self._axes[id(work)]
        used = tuple(net for axis, net in machine.networks.items() if axis in axes)
        # Full recomputation is of blocks only.
        recompute = candidate.recompute if is_block or candidate.recompute == "selective" else "none"
        key = (id(work), id(sizes), is_block, recompute, machine.device, machine.constants, used)
        if key not in self._segments:
            self._segments[key] = segment_cost(work, sizes, machine, candidate, self.training, is_block)
        return self._segments[key]

    def flop(self, work: SegmentWork, mesh: ProcessMesh) -> float:
        """FLOP of a segment's matrix products on whole tensors of the traced batch, backward included in training."""
        if id(work) not in self._flop:
            sizes = Sizes(ProcessMesh(mesh.axes, (1,) * len(mesh.axes), mesh.ranks[:1]), 1.0, self.training.precision)
            kernels = (*work.forward, *work.backward) if self.training.mode == "train" else work.forward
            self._flop[id(work)] = sum(p.flop for k in kernels for p in products(k, sizes))
            self._works[id(work)] = work
        return self._flop[id(work)]

    def _use_of_axes(self, work: SegmentWork, mesh: ProcessMesh) -> tuple[frozenset[str], bool]:
        """The axes along which a segment communicates in a micro step, and whether any of its values that grow with the
        batch is not split over the data-parallel group, or another one (experts) is, so that the group's size counts beside
        the samples of a rank."""
        if id(work) not in self._axes:
            dp = mesh.axes.index("dp") if "dp" in mesh.axes else None
            axes = frozenset(c.axis for k in (*work.forward, *work.backward) for c in k.collectives)
            spread = any(
                v.placement.dims_mapping[v.batch_dim] != dp if v.batch_dim is not None else dp in v.placement.dims_mapping
                for v in work.values()
            )
            self._axes[id(work)] = axes, spread
            self._works[id(work)] = work
        return self._axes[id(work)]


def networks(mesh: ProcessMesh, first: int, cluster: Cluster) -> dict[str, GroupNetwork]:
    """The network of each axis of the mesh when its first rank is ``first``."""
    shift = first - mesh.ranks[0]
    return {axis: group_network(cluster, tuple(r + shift for r in mesh.group(axis))) for axis in mesh.axes}
