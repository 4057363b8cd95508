"""Cost of one segment on one rank in one micro step: times of its passes, what it keeps for backward, what it needs beside it.

Kernels are costed one by one (``compute``), the collectives before them too (``communication``). On top come the choices that
change a segment's work without changing its placements:

- *full recomputation*: a block keeps its inputs only; backward begins by running its forward pass again, collectives included
  (``recompute`` says which ops);
- *selective recomputation*: the attention core is run again, its inner values are not kept (arXiv 2205.05198, section 5);
- *sequence parallelism*: each all-reduce of the mp group becomes a reduce-scatter and an all-gather, which move the same bytes;
  ops on hidden states, and the states kept, are split over the group (arXiv 2205.05198, section 4.2.2);
- *fused attention*: the attention core is one kernel forward and one backward, which keeps its operands and its result only.

A pass takes as long as the device needs, or as long as the host needs to issue its kernels, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from paddle_rbt_plugin.completion.work import Collective, CollectiveKind, Kernel, SegmentWork, Value
from paddle_rbt_plugin.cost.attention import AttentionCore, backward_cores, forward_cores
from paddle_rbt_plugin.cost.candidate import Candidate, Training
from paddle_rbt_plugin.cost.communication import GroupNetwork, collective_seconds
from paddle_rbt_plugin.cost.compute import ComputeDevice, attention_flop, fused_attention_cost, kernel_cost, products
from paddle_rbt_plugin.cost.constants import Constants
from paddle_rbt_plugin.cost.fusion import Traffic, pass_traffic
from paddle_rbt_plugin.cost.recompute import keeps_its_results, run_again
from paddle_rbt_plugin.cost.sizes import LOSS_OPS, Sizes, forward_type, grad_name


@dataclass(frozen=True)
class PassCost:
    """One pass through a segment: seconds of kernels and of collectives on the device, launches by the host, FLOP."""

    compute: float = 0.0
    launches: int = 0
    flop: float = 0.0
    along_mp: float = 0.0
    """Seconds of communication along the tensor-parallel axis."""
    along_dp: float = 0.0
    """Seconds along the data-parallel axis: of what the batch splits, and of what experts divided over it exchange."""
    regrouping: float = 0.0
    """Seconds to bring hidden states to layers on a mesh of another shape."""

    @property
    def communication(self) -> float:
        """Seconds of all communication."""
        return self.along_mp + self.along_dp + self.regrouping

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(
            self.compute + other.compute,
            self.launches + other.launches,
            self.flop + other.flop,
            self.along_mp + other.along_mp,
            self.along_dp + other.along_dp,
            self.regrouping + other.regrouping,
        )

    def seconds(self, c: Constants) -> float:
        """Time of the pass: the device's, or the host's where that is longer."""
        return max(self.compute + self.communication, self.launches * c.host_launch_s)


@dataclass(frozen=True)
class SegmentCost:
    """One segment in one micro step; bytes are per rank."""

    forward: PassCost
    recompute: PassCost
    backward: PassCost
    kept: float
    """Bytes that a micro batch in flight keeps until its backward pass."""
    revived: float
    """Bytes that recomputation brings back during this segment's backward pass."""
    temporary: float
    """Largest bytes that one op needs beside what is kept: its results and the gradients it reads."""
    message: float
    """Largest message of a collective."""


@dataclass(frozen=True)
class Machine:
    """What a segment runs on: the device and the network of each mesh axis."""

    device: ComputeDevice
    networks: Mapping[str, GroupNetwork]
    constants: Constants


def segment_cost(
    work: SegmentWork, sizes: Sizes, machine: Machine, candidate: Candidate, training: Training, is_block: bool
) -> SegmentCost:
    """Cost of a segment. Full recomputation applies to blocks only: embedding, head and loss keep their values."""
    recompute, fused_attention, fused_elementwise = candidate.recompute, training.fused_attention, training.fused_elementwise
    cores = (forward_cores(work), backward_cores(work)) if fused_attention or recompute == "selective" else ((), ())
    fused = cores if fused_attention else ((), ())
    saved = {v.name for v in work.saved}
    ahead = pass_traffic(work.forward, saved, fused_elementwise)
    back = pass_traffic(work.backward, saved, fused_elementwise)
    forward = _pass_cost(dict(enumerate(work.forward)), ahead, sizes, machine, fused[0])
    backward = _pass_cost(
        dict(enumerate(work.backward)), back, sizes, machine, fused[1], is_backward=True, overlap=training.overlap_mp
    )
    inner = frozenset(name for core in (*cores[0], *cores[1]) for name in core.inner)
    kept = [v for v in work.saved if v.is_activation and v.name not in inner]
    alone = [*_outside(work.forward, fused[0]), *_outside(work.backward, fused[1])]
    again, revived = PassCost(), 0.0
    if recompute == "full" and is_block:
        repeated = run_again(work.forward, range(len(work.forward)), training.whole_regions)
        drawn = _drawn(work, range(len(work.forward)), training)
        again = _pass_cost(repeated, ahead, sizes, machine, fused[0])
        revived = sum(sizes.stored(v) for v in kept if v not in drawn)
        kept = [*(v for v in work.inputs if v.is_activation), *drawn]
    elif recompute == "selective" and not fused_attention:
        for core in cores[0]:
            again += _pass_cost(run_again(work.forward, core.ops, training.whole_regions), ahead, sizes, machine)
        drawn = [v for core in cores[0] for v in _drawn(work, core.ops, training)]
        revived = sum(sizes.stored(v) for v in work.saved if v.name in inner and v not in drawn)
        kept += drawn
    return SegmentCost(
        forward=forward,
        recompute=again,
        backward=backward,
        kept=sum(map(sizes.stored, kept)),
        revived=revived,
        temporary=max((_temporary(k, sizes, saved) for k in alone), default=0.0),
        message=max((sizes.nbytes(c.value) for k in (*work.forward, *work.backward) for c in k.collectives), default=0.0),
    )


def _drawn(work: SegmentWork, region: Iterable[int], training: Training) -> list[Value]:
    """What the random ops of a recomputed region keep, since they are not run again."""
    kernels = [] if training.whole_regions else [work.forward[i] for i in region]
    return [v for kernel in kernels if keeps_its_results(kernel) for v in kernel.outputs if v.is_activation]


def collective_costs(collective: Collective, sizes: Sizes, machine: Machine) -> dict[CollectiveKind, float]:
    """Seconds of a collective as the training runs it: under sequence parallelism an all-reduce of the mp group runs in two."""
    net, nbytes = machine.networks.get(collective.axis), sizes.nbytes(collective.value)
    if net is None or net.ranks == 1:
        return {}
    kinds: tuple[CollectiveKind, ...] = (collective.kind,)
    if sizes.split > 1 and collective.axis == "mp" and collective.kind == "all_reduce":
        kinds = ("reduce_scatter", "all_gather")
    return {kind: collective_seconds(kind, nbytes, net, machine.constants) for kind in kinds}


def _pass_cost(
    kernels: Mapping[int, Kernel],
    traffic: Sequence[Traffic],
    sizes: Sizes,
    machine: Machine,
    fused: Iterable[AttentionCore] = (),
    is_backward: bool = False,
    overlap: bool = False,
) -> PassCost:
    """Cost of a pass, or of some of its kernels by their position, with each core of ``fused`` run as one kernel. With
    ``overlap`` the gradient of a product's input is reduced while the gradient of its weight is computed."""
    left_out = {i for core in fused for i in core.ops}
    total = sum((_fused_cost(core, sizes, machine, is_backward) for core in fused), PassCost())
    compute, launches, flop = total.compute, total.launches, total.flop
    along, beside = {"mp": 0.0, "dp": 0.0}, dict[str, float]()
    for i, kernel in kernels.items():
        if i in left_out:
            continue
        cost = kernel_cost(kernel, traffic[i], sizes, machine.device, machine.constants)
        compute += cost.seconds
        flop += cost.flop
        launches += cost.launches
        if overlap and kernel.type == "matmul_grad":
            name = grad_name(kernel.inputs[0].name)
            beside[name] = beside.get(name, 0.0) + _weight_gradient_seconds(kernel, sizes, machine)
        for collective in kernel.collectives:
            seconds = collective_costs(collective, sizes, machine)
            along[collective.axis] += sum(seconds.values())
            if overlap and collective.axis == "mp":
                reduction = seconds.get("all_reduce", seconds.get("reduce_scatter", 0.0))
                along["mp"] -= min(reduction, beside.get(collective.value.name, 0.0))
    return PassCost(compute, launches, flop, along["mp"], along["dp"])


def _weight_gradient_seconds(kernel: Kernel, sizes: Sizes, machine: Machine) -> float:
    """Time of a product's gradient without that of the input's gradient."""
    wanted = [v.name for v in kernel.outputs]
    work = products(kernel, sizes)
    if kernel.inputs[1].kind != "param" or len(work) != len(wanted):
        return 0.0
    left = grad_name(kernel.inputs[0].name)
    return sum(p.seconds(machine.device, machine.constants) for p, name in zip(work, wanted, strict=True) if name != left)


def _fused_cost(core: AttentionCore, sizes: Sizes, machine: Machine, is_backward: bool) -> PassCost:
    """The core as one kernel; a decoder's mask is causal."""
    *heads, queries, keys = sizes.shape(core.scores)
    flop = attention_flop(prod(heads, start=1.0), queries, keys, sizes.shape(core.query)[-1], causal=True)
    cost = fused_attention_cost(core.query, core.key, flop, sizes, machine.device, machine.constants, is_backward)
    return PassCost(cost.seconds, cost.launches, cost.flop)


def _outside(kernels: Sequence[Kernel], fused: Iterable[AttentionCore]) -> list[Kernel]:
    """The kernels that are not part of a fused attention."""
    inside = {i for core in fused for i in core.ops}
    return [kernel for i, kernel in enumerate(kernels) if i not in inside]


def _temporary(kernel: Kernel, sizes: Sizes, elsewhere: Collection[str]) -> float:
    """Results and gradients of an op that are counted nowhere else. An op of the loss also has a float32 copy of each value
    that is stored in half precision."""
    live = [*kernel.outputs, *(v for v in kernel.inputs if v.name.endswith("@GRAD"))]
    nbytes = sum(sizes.stored(v) for v in live if v.kind == "var" and v.name not in elsewhere)
    if sizes.half and forward_type(kernel.type) in LOSS_OPS:
        cast = [v for v in (*kernel.inputs, *kernel.outputs) if v.dtype == "float32" and sizes.itemsize(v) == 2]
        nbytes += sum(4.0 * sizes.numel(v) for v in cast)
    return nbytes
