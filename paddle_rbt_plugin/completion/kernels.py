"""What one op does on a mesh, forward and backward: its kernels, with the collectives that bring its operands to them.

Which placements an op needs and makes is Paddle's answer (``oracle``); nothing is inferred here.

Paddle reshards a value to one placement once and hands the result to all who need it there (``fold_reshard_pass``); so a
change that an earlier op has paid for costs nothing, and what backward reads of it is the copy that forward made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.built import Built, Source, Use
from paddle_rbt_plugin.completion.collectives import collectives_between
from paddle_rbt_plugin.completion.forms import LOSS_REDUCTIONS, Form, sharded_form
from paddle_rbt_plugin.completion.operands import GRADIENTS_MAY_BE_PARTIAL
from paddle_rbt_plugin.completion.oracle import Oracle
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.question import Operand, Question
from paddle_rbt_plugin.completion.rules import RuleOracle
from paddle_rbt_plugin.completion.synchronised import BATCH_NORM, SUMS, sums_statistics
from paddle_rbt_plugin.completion.work import Collective, Kernel, Phase, Value
from paddle_rbt_plugin.graph import Graph, Op

BatchDims = Mapping[int, int]
AnyOracle = Oracle | RuleOracle

Gradients = dict[int, list[Placement]]
"""The placements in which the gradients of a tensor arrive, by its position."""
Copies = tuple[tuple[int, frozenset[Placement]], ...]
"""Per tensor of a run of ops (by its place in a list), the placements it has been resharded to."""
Saved = dict[tuple[int, Placement], Value]
"""What must stay alive from forward to backward: tensors as they lie."""


class Kernels:
    """Makes the kernels of a graph's ops, in the order of execution, and knows where tensors lie by then.

    ``placements`` holds those of parameters and data, and gets those of what is computed."""

    def __init__(
        self,
        graph: Graph,
        mesh: ProcessMesh,
        oracle: AnyOracle,
        placements: dict[int, Placement],
        batch_dims: BatchDims,
        forms: Collection[str],
    ):
        self.graph = graph
        self.mesh = mesh
        self.oracle = oracle
        self.placements = placements
        self.batch_dims = batch_dims
        self.forms = forms
        self.remote_params: Mapping[int, int] = {}
        """The parameters that the ops to come read on another stage than the parameter's, each with what names the stage."""
        # Per forward tensor and the stage where it is a copy, the placements it was resharded to.
        self._copies: dict[tuple[int, int | None], frozenset[Placement]] = {}
        self._forward_copies = self._copies  # those of them that the forward pass made

    def begin_backward(self) -> None:
        """The forward pass has ended: what is resharded from now on is no copy that backward could read."""
        self._forward_copies = dict(self._copies)

    def copies_of(self, tensors: Iterable[int]) -> Copies:
        """What some tensors have been resharded to."""
        remote, copies = self.remote_params, self._copies
        keys = [(t, remote.get(t)) for t in tensors] if remote else [(t, None) for t in tensors]
        return tuple([(place, copies[key]) for place, key in enumerate(keys) if key in copies])

    def take_copies(self, tensors: Sequence[int], copies: Copies) -> None:
        """Notes that tensors have been resharded as those of an equal run of ops were."""
        self._copies.update((self._place(tensors[place]), targets) for place, targets in copies)

    def _place(self, tensor: int) -> tuple[int, int | None]:
        return tensor, self.remote_params.get(tensor)

    def value(self, tensor: int, placement: Placement | None = None) -> Value:
        """A tensor where it lies, or in another placement."""
        t = self.graph.tensors[tensor]
        return Value(t.name, t.shape, t.dtype, placement or self.placements[tensor], self.batch_dims.get(tensor), t.kind)

    def gradient(self, tensor: int, placement: Placement) -> Value:
        """The gradient of a tensor."""
        value = self.value(tensor, placement)
        return value._replace(name=f"{value.name}@GRAD", kind="var")

    def changes(self, value: Value, target: Placement, phase: Phase) -> tuple[Collective, ...]:
        """What brings a value to another placement."""
        return collectives_between(value, target, self.mesh, phase)

    def _reshard(self, tensor: int, target: Placement, phase: Phase) -> tuple[Collective, ...]:
        """Brings a forward tensor to a placement; free where an earlier op has done so."""
        done = self._copies.get(self._place(tensor), frozenset())
        if target == self.placements[tensor] or target in done:
            return ()
        self._copies[self._place(tensor)] = done | {target}
        return self.changes(self.value(tensor), target, phase)

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

    def forward(self, op: Op) -> Kernel:
        """The kernel of an op, after which ``placements`` holds those of its results."""
        if not op.operands:  # a constant lies whole on every rank
            for t in op.results:
                self.placements[t] = Placement.replicated(self.graph.tensors[t].ndim)
            return Kernel(op.type, "forward", (), tuple(self.value(t) for t in op.results), attrs=op.attrs)
        form = self._form(op)
        built = self.oracle.forward(self._question(op, form))
        for t, product in zip(op.results, built.products, strict=True):
            self.placements[t] = product.kept
        inputs: list[Value] = []
        collectives: list[Collective] = []
        for use in built.uses:
            tensor = op.operands[use.source.index]
            collectives += self._reshard(tensor, use.need, "forward")
            inputs.append(self.value(tensor, use.need))
        outputs = []
        for t, product in zip(op.results, built.products, strict=True):
            outputs.append(self.value(t, product.made))
            collectives += self.changes(outputs[-1], product.kept, "forward")
        if form.axis is not None:  # its loss is its last result
            collectives += [Collective("all_reduce", form.axis, outputs[-1], "forward")] * LOSS_REDUCTIONS
        collectives += self._summed_statistics(op, "forward")
        return Kernel(built.type, "forward", tuple(inputs), tuple(outputs), tuple(collectives), op.attrs)

    def backward(self, op: Op, gradients: Gradients, saved: Saved) -> list[Kernel]:
        """The kernels that sum the gradients of an op's results and give those of its operands, none where none is wanted.

        ``gradients`` gets what the operands receive, ``saved`` what is read of the forward pass."""
        tensors = self.graph.tensors
        if all(tensors[t].stop_gradient for t in op.operands) or not any(gradients.get(t) for t in op.results):
            return []
        kernels: list[Kernel] = []
        arriving: list[Placement | None] = []
        finished: list[Collective] = []
        for t in op.results:
            total: Placement | None = None
            if gradients.get(t):
                total, summed = self.summed(t, gradients[t])
                kernels += summed
                if op.type not in GRADIENTS_MAY_BE_PARTIAL:
                    target = total.of_gradient(self.placements[t])
                    finished += self.changes(self.gradient(t, total), target, "backward")
                    total = target
            arriving.append(total)
        finished += self._summed_statistics(op, "backward")
        done: set[tuple[Source, Placement]] = set()
        for built in self.oracle.backward(self._question(op, self._form(op), tuple(arriving))):
            for use in built.uses:
                self._save(op, use, saved)
            kernel = self._backward_kernel(op, built, done)
            kernels.append(replace(kernel, collectives=(*finished, *kernel.collectives)))
            finished = []
            for product in built.products:
                if product.gradient_of is not None:
                    gradients.setdefault(op.operands[product.gradient_of], []).append(product.kept)
        return kernels

    def _save(self, op: Op, use: Use, saved: Saved) -> None:
        """Notes what must stay alive from forward to backward: the tensor itself, or the copy that forward made of it."""
        tensor = self._forward_tensor(op, use)
        if tensor is None or not use.reads:
            return
        if use.need in self._forward_copies.get(self._place(tensor), ()):
            saved.setdefault((tensor, use.need), self.value(tensor, use.need)._replace(kind="var"))
        elif self.graph.tensors[tensor].kind != "param":
            saved.setdefault((tensor, use.have), self.value(tensor))

    def _summed_statistics(self, op: Op, phase: Phase) -> list[Collective]:
        """What a batch norm of a sharded batch sums over the ranks."""
        if op.type != BATCH_NORM or not sums_statistics(op.type, op.attrs, [self.placements[t] for t in op.operands]):
            return []
        samples, mean = op.operands[:2]
        axis = self.mesh.axes[self.placements[samples].dims_mapping[0]]
        (channels,) = self.graph.tensors[mean].shape
        sums = self.value(mean)._replace(shape=(SUMS * channels,), kind="var")
        return [Collective("all_reduce", axis, sums, phase)] if self.mesh.degree(axis) > 1 else []

    def summed(self, tensor: int, placements: Sequence[Placement]) -> tuple[Placement, list[Kernel]]:
        """The gradient of a tensor that several ops read is the sum of what they send."""
        if len(placements) == 1:
            return placements[0], []
        t = self.graph.tensors[tensor]
        operands = tuple(Operand(t.shape, t.dtype, p, False) for p in placements)
        built = self.oracle.forward(Question("add_n", (), (("inputs", operands),)))
        values = [self.gradient(tensor, p) for p in placements]
        collectives = [c for v, use in zip(values, built.uses, strict=True) for c in self.changes(v, use.need, "backward")]
        total = built.products[0].made
        inputs = tuple(v._replace(placement=use.need) for v, use in zip(values, built.uses, strict=True))
        return total, [Kernel("add_n", "backward", inputs, (self.gradient(tensor, total),), tuple(collectives))]

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
                collectives += self.changes(value, use.need, "backward")
            inputs.append(value._replace(placement=use.need))
        for product in built.products:
            if product.gradient_of is not None:
                made = self.gradient(op.operands[product.gradient_of], product.made)
            else:
                made = self._like(op, f"{op.name}.{built.type}", product.shape, product.dtype, product.made)
            outputs.append(made)
            collectives += self.changes(made, product.kept, "backward")
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
            return self.value(tensor)
        if use.source.kind == "gradient":
            return self.gradient(op.results[use.source.index], use.have)
        return self._like(op, f"{op.name}.local", use.shape, use.dtype, use.have)

    def _like(self, op: Op, name: str, shape: tuple[int, ...], dtype: str, placement: Placement) -> Value:
        """A value that only the backward pass knows; it grows with the batch as the op's tensor of the same shape does."""
        alike: Iterable[int] = (t for t in (*op.results, *op.operands) if self.graph.tensors[t].shape == shape)
        twin = next(iter(alike), None)
        return Value(name, shape, dtype, placement, None if twin is None else self.batch_dims.get(twin))
