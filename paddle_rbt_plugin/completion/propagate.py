"""Completion: from the placements of parameters and inputs to those of every tensor, forward and backward.

The graph is walked once forward and once backward, segment by segment. What each op does with the placements that arrive is
Paddle's answer (``oracle``); nothing is inferred here. A segment whose inputs lie as those of an equal segment did before is
not walked again: it shares the other's work, so time grows with distinct segments, not with layers.

Paddle reshards a value to one placement once and hands the result to all who need it there (``fold_reshard_pass``); so a
change that an earlier op has paid for costs nothing, and what backward reads of it is the copy that forward made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.collectives import collectives_between
from paddle_rbt_plugin.completion.forms import FORMS, LOSS_REDUCTIONS, Form, sharded_form
from paddle_rbt_plugin.completion.oracle import Built, Operand, Oracle, Question, Source, Use
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.rules import RuleOracle
from paddle_rbt_plugin.completion.work import Collective, Completion, Crossing, Kernel, Phase, SegmentWork, Value
from paddle_rbt_plugin.graph import Graph, Op
from paddle_rbt_plugin.layers.layers import Layers, Segment

BatchDims = Mapping[int, int]
AnyOracle = Oracle | RuleOracle


def make_oracle(mesh: ProcessMesh) -> AnyOracle:
    """What asks the installed Paddle: it builds ops where PIR knows distributed types (3.0 on), else it asks the rules."""
    import paddle

    distributed = hasattr(paddle.base.libpaddle.pir, "create_tensor_dist_attribute")
    return Oracle(mesh) if distributed else RuleOracle(mesh)


def complete(
    graph: Graph,
    layers: Layers,
    mesh: ProcessMesh,
    leaves: Mapping[int, Placement],
    batch: int,
    batch_dims: BatchDims | None = None,
    oracle: AnyOracle | None = None,
    train: bool = True,
    forms: Collection[str] = FORMS,
    apart: Apart = (),
    memo: Memo | None = None,
) -> Completion:
    """Completes a graph on a mesh.

    ``leaves`` places parameters and data by tensor position; one that is missing is replicated. ``batch_dims`` says which
    dimension of a tensor grows with the batch, see ``find_batch_dims``. ``oracle`` keeps answers from one call to the next;
    its mesh has the same axes, and degrees that divide the same dimensions. Without ``train`` there is no backward pass.
    ``forms`` are the ops that may take another form. ``apart`` says which parameters are read on other stages, see
    ``reads_apart``. ``memo`` keeps the work of segments for completions that differ in nothing but ``apart``.
    Raises UnsupportedProgram for an op that Paddle cannot build.
    """
    oracle = oracle or make_oracle(mesh)
    return _Completer(graph, layers, mesh, oracle, leaves, batch_dims or {}, train, forms, apart, memo or Memo()).run(batch)


def reads_apart(graph: Graph, layers: Layers, stages: Sequence[int]) -> Apart:
    """The parameters that segments read on another stage than their own; ``stages`` holds the stage of each layer.

    Such a stage is sent a copy in every micro step and sends the gradient back. Different cuts of a model mostly have the same
    answer: none, or a head that is tied to the embedding."""
    home: dict[int, int] = {}
    first: dict[tuple[int, int], int] = {}
    apart = []
    for i, segment in enumerate(layers.segments):
        stage = stages[segment.layer]
        for t in _externals(graph, segment):
            if graph.tensors[t].kind == "param" and home.setdefault(t, stage) != stage:
                apart.append((i, t, first.setdefault((t, stage), i)))
    return tuple(apart)


Apart = tuple[tuple[int, int, int], ...]
"""A segment, a parameter that it reads on another stage than the parameter's, the first segment of its stage to do so."""

Copies = tuple[tuple[int, frozenset[Placement]], ...]
"""Per tensor of a segment (by its place), the placements it has been resharded to."""


@dataclass(frozen=True)
class _Forward:
    results: tuple[Placement, ...]
    kernels: tuple[Kernel, ...]
    copies: Copies


@dataclass(frozen=True)
class _Backward:
    kernels: tuple[Kernel, ...]
    gradients: tuple[tuple[int, tuple[Placement, ...]], ...]
    """Per external tensor of the segment (by its place), the gradients it receives."""
    trained: tuple[int, ...]
    """Which of the segment's own parameters (by their place) get a gradient."""
    syncs: tuple[Collective, ...]
    saved: tuple[Value, ...]
    copies: Copies


@dataclass(frozen=True)
class Memo:
    """What equal segments share, forward, backward and put together."""

    forward: dict[tuple, _Forward] = field(default_factory=dict)
    backward: dict[tuple, _Backward] = field(default_factory=dict)
    work: dict[tuple[tuple, int], SegmentWork] = field(default_factory=dict)


class _Completer:
    def __init__(
        self,
        graph: Graph,
        layers: Layers,
        mesh: ProcessMesh,
        oracle: AnyOracle,
        leaves: Mapping[int, Placement],
        batch_dims: BatchDims,
        train: bool,
        forms: Collection[str],
        apart: Apart,
        memo: Memo,
    ):
        self.graph = graph
        self.layers = layers
        self.oracle = oracle
        self.mesh = mesh
        self.batch_dims = batch_dims
        self.train = train
        self.forms = forms
        self.memo = memo
        self.placements: dict[int, Placement] = {
            t.index: leaves.get(t.index, Placement.replicated(t.ndim)) for t in graph.tensors if t.kind != "var"
        }
        self.gradients: dict[int, list[Placement]] = {}
        self.sent: dict[int, dict[int, list[Placement]]] = {}  # gradients of parameters from other stages, stage by stage
        # Per forward tensor and the stage where it is a copy, the placements it was resharded to.
        self.copies: dict[tuple[int, int | None], frozenset[Placement]] = {}
        self.forward_copies = self.copies  # those of them that the forward pass made
        self.apart: dict[int, dict[int, int]] = {}
        for i, t, stage in apart:
            self.apart.setdefault(i, {})[t] = stage
        self.here: Mapping[int, int] = {}  # what the segment being walked reads of other stages
        self.externals = [_externals(graph, s) for s in layers.segments]
        self.owned = self._owned_params()

    def run(self, batch: int) -> Completion:
        segments = self.layers.segments
        forward, shared = self.memo.forward, self.memo.work
        keys = []
        for i, (segment, externals) in enumerate(zip(segments, self.externals, strict=True)):
            self.here = self.apart.get(i, {})
            key = (segment.kind, tuple(self.placements[t] for t in externals), self._copies(externals))
            results = self._results(segment)
            if key not in forward:
                forward[key] = self._forward(segment, (*externals, *results))
            else:
                self.placements.update(zip(results, forward[key].results, strict=True))
                self._take_copies((*externals, *results), forward[key].copies)
            keys.append(key)
        backward = self._backward_pass(keys) if self.train else [_Backward((), (), (), (), (), ())] * len(segments)
        work = []
        for i, segment in enumerate(segments):
            parts = (keys[i], id(backward[i]))
            if parts not in shared:
                shared[parts] = self._work(i, segment, forward[keys[i]], backward[i])
            work.append(shared[parts])
        return Completion(self.mesh, batch, self.layers, tuple(work), self.placements, tuple(self._crossings()))

    # Structure of segments

    def _results(self, segment: Segment) -> list[int]:
        return [t for op in segment.ops for t in self.graph.ops[op].results]

    def _copies(self, tensors: Iterable[int]) -> Copies:
        keys = ((place, self._place(t)) for place, t in enumerate(tensors))
        return tuple((place, self.copies[key]) for place, key in keys if key in self.copies)

    def _take_copies(self, tensors: Sequence[int], copies: Copies) -> None:
        self.copies.update((self._place(tensors[place]), targets) for place, targets in copies)

    def _place(self, tensor: int) -> tuple[int, int | None]:
        return tensor, self.here.get(tensor)

    def _owned_params(self) -> list[tuple[int, ...]]:
        """Per segment, the parameters that it is the first to read."""
        seen: set[int] = set()
        owned = []
        for externals in self.externals:
            new = [t for t in externals if self.graph.tensors[t].kind == "param" and t not in seen]
            seen.update(new)
            owned.append(tuple(new))
        return owned

    def _value(self, tensor: int, placement: Placement | None = None) -> Value:
        t = self.graph.tensors[tensor]
        return Value(t.name, t.shape, t.dtype, placement or self.placements[tensor], self.batch_dims.get(tensor), t.kind)

    def _gradient(self, tensor: int, placement: Placement) -> Value:
        value = self._value(tensor, placement)
        return value._replace(name=f"{value.name}@GRAD", kind="var")

    def _changes(self, value: Value, target: Placement, phase: Phase) -> tuple[Collective, ...]:
        return collectives_between(value, target, self.mesh, phase)

    def _reshard(self, tensor: int, target: Placement, phase: Phase) -> tuple[Collective, ...]:
        """Brings a forward tensor to a placement; free where an earlier op has done so."""
        done = self.copies.get(self._place(tensor), frozenset())
        if target == self.placements[tensor] or target in done:
            return ()
        self.copies[self._place(tensor)] = done | {target}
        return self._changes(self._value(tensor), target, phase)

    # Forward

    def _form(self, op: Op) -> Form:
        if op.type not in self.forms:
            return Form(op.type, op.attrs)
        first = {slot: of[0] for slot, of in op.inputs.items() if of}
        shapes = {slot: self.graph.tensors[t].shape for slot, t in first.items()}
        placements = {slot: self.placements[t] for slot, t in first.items()}
        return sharded_form(op.type, op.attrs, shapes, placements, self.mesh, self.mesh.ranks[0])

    def _question(self, op: Op, form: Form, gradients: tuple[Placement | None, ...] | None = None) -> Question:
        tensors = self.graph.tensors
        slots = tuple(
            (
                form.slots.get(slot, slot),
                tuple(
                    Operand(tensors[t].shape, tensors[t].dtype, self.placements[t], tensors[t].stop_gradient) for t in operands
                ),
            )
            for slot, operands in op.inputs.items()
        )
        results = tuple((tensors[t].shape, tensors[t].dtype) for t in op.results)
        return Question(form.type, tuple(form.attrs.items()), slots, gradients, results)

    def _forward(self, segment: Segment, tensors: Sequence[int]) -> _Forward:
        kernels = [self._forward_op(self.graph.ops[i]) for i in segment.ops]
        results = tuple(self.placements[t] for t in self._results(segment))
        return _Forward(results, tuple(kernels), self._copies(tensors))

    def _forward_op(self, op: Op) -> Kernel:
        if not op.operands:  # a constant lies whole on every rank
            for t in op.results:
                self.placements[t] = Placement.replicated(self.graph.tensors[t].ndim)
            return Kernel(op.type, "forward", (), tuple(self._value(t) for t in op.results), attrs=op.attrs)
        form = self._form(op)
        built = self.oracle.forward(self._question(op, form))
        for t, product in zip(op.results, built.products, strict=True):
            self.placements[t] = product.kept
        inputs: list[Value] = []
        collectives: list[Collective] = []
        for use in built.uses:
            tensor = op.operands[use.source.index]
            collectives += self._reshard(tensor, use.need, "forward")
            inputs.append(self._value(tensor, use.need))
        outputs = []
        for t, product in zip(op.results, built.products, strict=True):
            outputs.append(self._value(t, product.made))
            collectives += self._changes(outputs[-1], product.kept, "forward")
        if form.axis is not None:  # its loss is its last result
            collectives += [Collective("all_reduce", form.axis, outputs[-1], "forward")] * LOSS_REDUCTIONS
        return Kernel(built.type, "forward", tuple(inputs), tuple(outputs), tuple(collectives), op.attrs)

    # Backward

    def _backward_pass(self, keys: Sequence[tuple]) -> list[_Backward]:
        if self.graph.loss is not None:
            self.gradients[self.graph.loss] = [Placement.replicated(self.graph.tensors[self.graph.loss].ndim)]
        self.forward_copies = dict(self.copies)
        memo = self.memo.backward
        done: list[_Backward] = []
        for i in reversed(range(len(keys))):
            self.here = self.apart.get(i, {})
            segment, externals = self.layers.segments[i], self.externals[i]
            results = self._results(segment)
            arriving = tuple(tuple(self.gradients.get(t, ())) for t in (*results, *self.owned[i]))
            tensors = (*externals, *results)
            sent = tuple(tuple(map(tuple, self.sent.get(t, {}).values())) for t in self.owned[i])
            key = (keys[i], arriving, sent, self._copies(tensors))
            if key not in memo:
                memo[key] = self._backward(i, segment, externals, tensors)
            else:
                self._take_copies(tensors, memo[key].copies)
            for place, placements in memo[key].gradients:
                t = externals[place]
                received = self.sent.setdefault(t, {}) if t in self.here else self.gradients
                received.setdefault(self.here.get(t, t), []).extend(placements)
            done.append(memo[key])
        return done[::-1]

    def _backward(self, index: int, segment: Segment, externals: tuple[int, ...], tensors: Sequence[int]) -> _Backward:
        gradients = {t: list(g) for t, g in self.gradients.items()}
        before = {t: len(gradients.get(t, ())) for t in externals}
        kernels: list[Kernel] = []
        saved: dict[tuple[int, Placement], Value] = {}
        for i in reversed(segment.ops):
            kernels += self._backward_op(self.graph.ops[i], gradients, saved)
        received = tuple(
            (place, tuple(gradients[t][before[t] :]))
            for place, t in enumerate(externals)
            if len(gradients.get(t, ())) > before[t]
        )
        trained: list[int] = []
        syncs: list[Collective] = []
        for place, t in enumerate(self.owned[index]):
            arrived, moved = self._from_other_stages(t)
            kernels += moved
            if arrived or gradients.get(t):
                trained.append(place)
                total, summed = self._summed(t, [*arrived, *gradients.get(t, ())])
                kernels += summed
                syncs += self._changes(self._gradient(t, total), self.placements[t], "optimizer")
        return _Backward(tuple(kernels), received, tuple(trained), tuple(syncs), tuple(saved.values()), self._copies(tensors))

    def _from_other_stages(self, tensor: int) -> tuple[list[Placement], list[Kernel]]:
        """The gradients of a parameter that other stages send: each is summed there and reduced here."""
        whole, kernels = self.placements[tensor], []
        sent = self.sent.get(tensor, {}).values()
        for placements in sent:
            total, summed = self._summed(tensor, placements)
            value, arrived = self._gradient(tensor, total), self._gradient(tensor, whole)
            kernels += [*summed, Kernel("reshard", "backward", (value,), (arrived,), self._changes(value, whole, "backward"))]
        return [whole] * len(sent), kernels

    def _backward_op(
        self, op: Op, gradients: dict[int, list[Placement]], saved: dict[tuple[int, Placement], Value]
    ) -> list[Kernel]:
        tensors = self.graph.tensors
        if all(tensors[t].stop_gradient for t in op.operands) or not any(gradients.get(t) for t in op.results):
            return []
        kernels: list[Kernel] = []
        arriving: list[Placement | None] = []
        for t in op.results:
            total: Placement | None = None
            if gradients.get(t):
                total, summed = self._summed(t, gradients[t])
                kernels += summed
            arriving.append(total)
        done: set[tuple[Source, Placement]] = set()
        for built in self.oracle.backward(self._question(op, self._form(op), tuple(arriving))):
            for use in built.uses:
                self._save(op, use, saved)
            kernels.append(self._backward_kernel(op, built, done))
            for product in built.products:
                if product.gradient_of is not None:
                    gradients.setdefault(op.operands[product.gradient_of], []).append(product.kept)
        return kernels

    def _save(self, op: Op, use: Use, saved: dict[tuple[int, Placement], Value]) -> None:
        """Notes what must stay alive from forward to backward: the tensor itself, or the copy that forward made of it."""
        tensor = self._forward_tensor(op, use)
        if tensor is None or not use.reads:
            return
        if use.need in self.forward_copies.get(self._place(tensor), ()):
            saved.setdefault((tensor, use.need), self._value(tensor, use.need)._replace(kind="var"))
        elif self.graph.tensors[tensor].kind != "param":
            saved.setdefault((tensor, use.have), self._value(tensor))

    def _summed(self, tensor: int, placements: Sequence[Placement]) -> tuple[Placement, list[Kernel]]:
        """The gradient of a tensor that several ops read is the sum of what they send."""
        if len(placements) == 1:
            return placements[0], []
        t = self.graph.tensors[tensor]
        operands = tuple(Operand(t.shape, t.dtype, p, False) for p in placements)
        built = self.oracle.forward(Question("add_n", (), (("inputs", operands),)))
        values = [self._gradient(tensor, p) for p in placements]
        collectives = [c for v, use in zip(values, built.uses, strict=True) for c in self._changes(v, use.need, "backward")]
        total = built.products[0].kept
        inputs = tuple(v._replace(placement=use.need) for v, use in zip(values, built.uses, strict=True))
        return total, [Kernel("add_n", "backward", inputs, (self._gradient(tensor, total),), tuple(collectives))]

    def _backward_kernel(self, op: Op, built: Built, done: set[tuple[Source, Placement]]) -> Kernel:
        """A gradient op; ``done`` are the gradients that earlier kernels of the same op have resharded."""
        inputs, outputs = [], []
        collectives: list[Collective] = []
        for use in built.uses:
            value = self._used_value(op, use)
            tensor = self._forward_tensor(op, use)
            if tensor is not None:
                collectives += self._reshard(tensor, use.need, "backward")
            elif (use.source, use.need) not in done:
                done.add((use.source, use.need))
                collectives += self._changes(value, use.need, "backward")
            inputs.append(value._replace(placement=use.need))
        for product in built.products:
            if product.gradient_of is not None:
                made = self._gradient(op.operands[product.gradient_of], product.made)
            else:
                made = self._like(op, f"{op.name}.{built.type}", product.shape, product.dtype, product.made)
            outputs.append(made)
            collectives += self._changes(made, product.kept, "backward")
        return Kernel(built.type, "backward", tuple(inputs), tuple(outputs), tuple(collectives), built.attrs)

    @staticmethod
    def _forward_tensor(op: Op, use: Use) -> int | None:
        """The forward tensor that a gradient op reads; None where it reads a gradient or a local value."""
        if use.source.kind == "input":
            return op.operands[use.source.index]
        return op.results[use.source.index] if use.source.kind == "output" else None

    def _used_value(self, op: Op, use: Use) -> Value:
        tensor = self._forward_tensor(op, use)
        if tensor is not None:
            return self._value(tensor)
        if use.source.kind == "gradient":
            return self._gradient(op.results[use.source.index], use.have)
        return self._like(op, f"{op.name}.local", use.shape, use.dtype, use.have)

    def _like(self, op: Op, name: str, shape: tuple[int, ...], dtype: str, placement: Placement) -> Value:
        """A value that only the backward pass knows; it grows with the batch as the op's tensor of the same shape does."""
        alike: Iterable[int] = (t for t in (*op.results, *op.operands) if self.graph.tensors[t].shape == shape)
        twin = next(iter(alike), None)
        return Value(name, shape, dtype, placement, None if twin is None else self.batch_dims.get(twin))

    # Result

    def _crossings(self) -> Iterator[Crossing]:
        readers: dict[int, dict[int, None]] = {}
        for segment, externals in zip(self.layers.segments, self.externals, strict=True):
            for t in externals:
                readers.setdefault(t, {})[segment.layer] = None
        home = {t: segment.layer for segment in self.layers.segments for t in self._results(segment)}
        for t, layers in readers.items():
            layer = home.get(t, next(iter(layers)))
            others = tuple(sorted(layers.keys() - {layer}))
            if others:
                whole = Placement(self.placements[t].dims_mapping)
                yield Crossing(self._value(t, whole), layer, others, t in self.gradients or t in self.sent)

    def _work(self, index: int, segment: Segment, forward: _Forward, backward: _Backward) -> SegmentWork:
        externals = self.externals[index]
        own = set(segment.ops)
        results = (t for op in segment.ops for t in self.graph.ops[op].results)
        return SegmentWork(
            forward=forward.kernels,
            backward=backward.kernels,
            params=tuple(self._value(t) for t in self.owned[index]),
            trained=tuple(self._value(self.owned[index][place]) for place in backward.trained),
            gradient_syncs=backward.syncs,
            saved=backward.saved,
            inputs=tuple(self._value(t) for t in externals if self.graph.tensors[t].kind != "param"),
            outputs=tuple(self._value(t) for t in results if any(c.index not in own for c in self.graph.consumers(t))),
        )


def _externals(graph: Graph, segment: Segment) -> tuple[int, ...]:
    """Tensors that a segment reads and does not write, in the order of first use."""
    written = {t for op in segment.ops for t in graph.ops[op].results}
    read = (t for op in segment.ops for t in graph.ops[op].operands)
    return tuple(dict.fromkeys(t for t in read if t not in written))
