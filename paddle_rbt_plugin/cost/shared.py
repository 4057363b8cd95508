"""What the candidates of one search share: equal work on equal machines with equal local sizes is costed once.

A segment's cost depends on its work (which names the mesh axes, not their sizes), on the samples
that a rank holds, on recomputation and sequence parallelism, and on the device and the networks that its collectives use.
Thousands of candidates differ in nothing of this for most of their segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paddle_rbt_plugin.cluster import Cluster, Device, MachineGroup, ProcessMesh
from paddle_rbt_plugin.completion.work import Completion, SegmentWork, Value
from paddle_rbt_plugin.cost.candidate import Candidate, Training
from paddle_rbt_plugin.cost.communication import GroupNetwork, collective_seconds, group_network
from paddle_rbt_plugin.cost.compute import ComputeDevice, products
from paddle_rbt_plugin.cost.constants import DEFAULT, Constants, constants_on
from paddle_rbt_plugin.cost.segments import Machine, SegmentCost, segment_cost
from paddle_rbt_plugin.cost.sizes import Sizes, loss_values
from paddle_rbt_plugin.cost.transfers import Routes, Sends, chunk_sends, find_routes


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
        self._routes: dict[tuple[object, ...], tuple[Completion, Routes]] = {}
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
        """What the stages send each other; ``chunk_layers`` as in ``chunk_sends``. ``of_layer`` holds the completion of each
        layer where they differ."""
        if of_layer is not None:
            return self._sum_sends(completion, candidate, chunk_layers, of_layer)
        mesh, strategy = completion.mesh, (candidate.pp, candidate.micro_batch, candidate.sequence_parallel)
        key = (id(completion.crossings), mesh.axes, mesh.shape, chunk_layers, *strategy)
        if key not in self._sends:
            same = (completion,) * completion.layers.count
            self._sends[key] = completion, self._sum_sends(completion, candidate, chunk_layers, same)
        return self._sends[key][1]

    def _sum_sends(
        self, completion: Completion, candidate: Candidate, chunk_layers: tuple[int, ...], of_layer: Sequence[Completion]
    ) -> Sends:
        place = {id(c.value): i for i, c in enumerate(completion.crossings)}
        ranks = completion.mesh.size
        known: dict[tuple[int, int], float] = {}  # bytes of a value as one completion has it; most layers share theirs

        def stored(value: Value, layer: int) -> float:
            mine = of_layer[layer]
            at = id(value), id(mine)
            if at not in known:
                scale = candidate.micro_batch * mine.mesh.degree("dp") / mine.batch
                key = ("sent", mine.mesh.axes, mine.mesh.shape, scale, candidate.sequence_parallel)
                if key not in self._sizes:
                    self._sizes[key] = Sizes(mine.mesh, scale, self.training.precision, candidate.sequence_parallel)
                known[at] = self._sizes[key].stored(mine.crossings[place[id(value)]].value)
            return known[at]

        def seconds(value: Value, layer: int, source: int, target: int) -> float:
            nbytes, net = stored(value, layer), self.pair(source * ranks, target * ranks)
            whole = not self.training.own_copies or candidate.sequence_parallel
            mp = None if whole else self.machine(of_layer[layer].mesh, source * ranks)[1].networks.get("mp")
            if mp is None or mp.ranks == 1:
                return collective_seconds("p2p", nbytes, net, self.constants)
            # Each rank sends its part, the receivers gather it (arXiv 2104.04473, section 4.1).
            part = collective_seconds("p2p", nbytes / mp.ranks, net, self.constants)
            return part + collective_seconds("all_gather", nbytes, mp, self.constants)

        return chunk_sends(self._routes_of(completion, chunk_layers, candidate.pp), seconds, stored)

    def _routes_of(self, completion: Completion, chunk_layers: tuple[int, ...], stages: int) -> Routes:
        key = (id(completion.crossings), chunk_layers, stages)
        if key not in self._routes:
            self._routes[key] = completion, find_routes(completion, chunk_layers, stages, self.training.own_copies)
        return self._routes[key][1]

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
