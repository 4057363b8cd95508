"""What of a segment costs something: the kernels and collectives of its passes, what it keeps for backward and needs beside it.

On top of its work come the choices that change it without changing placements:

- *full recomputation*: a block keeps its inputs only; backward begins by running its forward pass again, collectives included
  (``recompute`` says which ops);
- *selective recomputation*: the attention core is run again, its inner values are not kept (arXiv 2205.05198, section 5);
- *fused attention*: the attention core is one kernel forward and one backward, which keeps its operands and its result only.

Nothing is costed here: kernels, collectives and values get numbers, under which ``table`` has their costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from paddle_rbt_plugin.completion.work import Collective, CollectiveKind, Kernel, SegmentWork, Value
from paddle_rbt_plugin.cost.attention import AttentionCore, backward_cores, forward_cores
from paddle_rbt_plugin.cost.candidate import Recompute, Training
from paddle_rbt_plugin.cost.compute import KernelTable
from paddle_rbt_plugin.cost.fusion import pass_traffic
from paddle_rbt_plugin.cost.op_types import LOSS_OPS, VIEWS, forward_type, grad_name, loss_values
from paddle_rbt_plugin.cost.recompute import keeps_its_results, run_again
from paddle_rbt_plugin.cost.sizes import Columns, Term, Values


@dataclass
class Numbers:
    """The values, kernels and collectives of some segments, numbered."""

    values: Values
    kernels: KernelTable = field(default_factory=KernelTable)
    collectives: dict[tuple[str, CollectiveKind, int], int] = field(default_factory=dict)
    """By axis, kind and the value sent."""
    hidden: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Collectives along mp, each with the matrix products that run beside it."""


@dataclass
class Pass:
    """One pass through a segment, by numbers."""

    kernels: list[int] = field(default_factory=list)
    along: dict[str, list[int]] = field(default_factory=lambda: {"mp": [], "dp": []})
    """Collectives by axis. Along dp are those of what the batch splits, and of what experts divided over it exchange."""
    hidden: list[int] = field(default_factory=list)
    launches: int = 0
    """Kernels that the host issues."""


@dataclass(frozen=True)
class Recomputed:
    """What a recomputation makes of a segment: what backward runs again, what a micro batch in flight keeps until then, and
    what recomputation brings back."""

    again: Pass
    kept: list[Term]
    revived: list[Term]


class Segment:
    """One segment, read into ``numbers``. Full recomputation is of blocks only: embedding, head and loss keep their values."""

    def __init__(self, work: SegmentWork, is_block: bool, numbers: Numbers, training: Training):
        self._work = work
        self._numbers = numbers
        self._training = training
        self._columns = Columns(numbers.values, loss_values(work.forward))
        self._cores = forward_cores(work), backward_cores(work)
        self._fused = self._cores if training.fused_attention else ((), ())
        self._saved = {v.name for v in work.saved}
        self.kernels = self._read(work.forward), self._read(work.backward)
        """Per op forward and backward its kernel, those of an attention that is fused included; None for what moves nothing."""
        self.forward = self._pass(enumerate(work.forward), self.kernels[0], self._fused[0])
        self.backward = self._pass(enumerate(work.backward), self.kernels[1], self._fused[1], is_backward=True)
        none = Recomputed(Pass(), self._stored(self._kept()), [])
        full = self._full() if is_block else none
        self.recomputed: Mapping[Recompute, Recomputed] = {"none": none, "selective": self._selective(none), "full": full}
        self.elements = self._elements()
        """Sums for parameters, for those that are trained, and for the gradients to reduce along dp and along mp."""
        self.temporaries = self._temporaries()
        self.messages = self._messages()

    def _elements(self) -> list[list[Term]]:
        syncs = self._work.gradient_syncs
        reduced = ([s.value for s in syncs if s.axis == axis] for axis in ("dp", "mp"))
        return [
            [Term(self._columns[v], 1.0 / self._columns.itemsize(v), stored=False) for v in values]
            for values in ((*self._work.params, *self._work.unread), self._work.trained, *reduced)
        ]

    def _temporaries(self) -> list[list[Term]]:
        """What each op needs: results and gradients that are counted nowhere else. An op of the loss also has a float32 copy
        of each value that is stored in half precision."""
        kernels = (*_outside(self._work.forward, self._fused[0]), *_outside(self._work.backward, self._fused[1]))
        return [list(terms) for terms in dict.fromkeys(tuple(self._needs(kernel)) for kernel in kernels)]

    def _messages(self) -> list[list[Term]]:
        """What each collective sends."""
        kernels = chain(self._work.forward, self._work.backward)
        sent = dict.fromkeys(self._columns[c.value] for k in kernels for c in k.collectives)
        return [[Term(value, stored=False)] for value in sent]

    def _read(self, kernels: Sequence[Kernel]) -> list[int | None]:
        traffic = pass_traffic(kernels, self._saved, self._training.fused_elementwise)
        return [
            None if forward_type(kernel.type) in VIEWS else self._numbers.kernels.add(kernel, moved, self._columns)
            for kernel, moved in zip(kernels, traffic, strict=True)
        ]

    def _pass(
        self,
        ops: Iterable[tuple[int, Kernel]],
        numbers: Sequence[int | None],
        fused: Sequence[AttentionCore] = (),
        is_backward: bool = False,
    ) -> Pass:
        """Some ops of a pass by their position, with each core of ``fused`` run as one kernel. Where training overlaps the
        two, the gradient of a product's input is reduced while the gradient of its weight is computed."""
        made = Pass([self._numbers.kernels.add_core(core, self._columns, is_backward) for core in fused])
        inside = {i for core in fused for i in core.ops}
        beside: dict[str, tuple[int, ...]] = {}
        for i, op in ops:
            if i in inside:
                continue
            kernel = numbers[i] if op.type != "reshard" else None
            if kernel is not None:
                made.kernels.append(kernel)
                if is_backward and self._training.overlap_mp and op.type == "matmul_grad":
                    name = grad_name(op.inputs[0].name)
                    beside[name] = (*beside.get(name, ()), *self._weight_products(op, kernel))
            for collective in op.collectives:
                number = self._number(collective)
                made.along[collective.axis].append(number)
                if collective.axis == "mp" and collective.value.name in beside:
                    made.hidden.append(len(self._numbers.hidden))
                    self._numbers.hidden.append((number, beside[collective.value.name]))
        made.launches = sum(map(self._numbers.kernels.is_launched, made.kernels))
        return made

    def _number(self, collective: Collective) -> int:
        known = self._numbers.collectives
        return known.setdefault((collective.axis, collective.kind, self._columns[collective.value]), len(known))

    def _weight_products(self, op: Kernel, kernel: int) -> list[int]:
        """The matrix products of a product's gradient without those of the input's gradient."""
        products = self._numbers.kernels.products_of(kernel)
        if op.inputs[1].kind != "param" or len(products) != len(op.outputs):
            return []
        left = grad_name(op.inputs[0].name)
        return [p for p, out in zip(products, op.outputs, strict=True) if out.name != left]

    def _kept(self) -> list[Value]:
        """The activations that backward reads, those inside a core that is fused left out."""
        inner = self._inner() if self._training.fused_attention else frozenset()
        return [v for v in self._work.saved if v.is_activation and v.name not in inner]

    def _full(self) -> Recomputed:
        forward = self._work.forward
        again = run_again(forward, range(len(forward)), self._training.whole_regions)
        drawn = self._drawn(range(len(forward)))
        kept = [*(v for v in self._work.inputs if v.is_activation), *drawn]
        revived = [v for v in self._kept() if v not in drawn]
        return Recomputed(self._pass(again.items(), self.kernels[0], self._fused[0]), self._stored(kept), self._stored(revived))

    def _selective(self, none: Recomputed) -> Recomputed:
        cores = self._cores[0]
        if self._training.fused_attention or not cores:
            return none
        forward, whole = self._work.forward, self._training.whole_regions
        again = [op for core in cores for op in run_again(forward, core.ops, whole).items()]
        drawn = [v for core in cores for v in self._drawn(core.ops)]
        inner = self._inner()
        kept = [*(v for v in self._kept() if v.name not in inner), *drawn]
        revived = [v for v in self._work.saved if v.name in inner and v not in drawn]
        return Recomputed(self._pass(again, self.kernels[0]), self._stored(kept), self._stored(revived))

    def _inner(self) -> frozenset[str]:
        return frozenset(name for core in chain(*self._cores) for name in core.inner)

    def _drawn(self, region: Iterable[int]) -> list[Value]:
        """What the random ops of a recomputed region keep, since they are not run again."""
        kernels = [] if self._training.whole_regions else [self._work.forward[i] for i in region]
        return [v for kernel in kernels if keeps_its_results(kernel) for v in kernel.outputs if v.is_activation]

    def _stored(self, values: Iterable[Value]) -> list[Term]:
        return [Term(self._columns[v]) for v in values]

    def _needs(self, kernel: Kernel) -> Iterator[Term]:
        live = (*kernel.outputs, *(v for v in kernel.inputs if v.name.endswith("@GRAD")))
        yield from (Term(self._columns[v]) for v in live if v.kind == "var" and v.name not in self._saved)
        if forward_type(kernel.type) in LOSS_OPS:
            half = (v for v in (*kernel.inputs, *kernel.outputs) if self._columns.is_halved(v))
            yield from (Term(self._columns[v], 2.0, stored=False) for v in half)


def _outside(kernels: Sequence[Kernel], fused: Iterable[AttentionCore]) -> list[Kernel]:
    """The kernels that are not part of a fused attention."""
    inside = {i for core in fused for i in core.ops}
    return [kernel for i, kernel in enumerate(kernels) if i not in inside]
