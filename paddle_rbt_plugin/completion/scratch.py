"""How the oracle asks: it builds the op, and its backward pass, in a scratch program.

The inputs are given distributed types, the op is built through ``paddle._C_ops``, and the distributed attributes of the new op
say what its operands must become and how its results lie. ``call_vjp`` on that op builds the gradient ops that Paddle would
build. No process group and no device is needed, and meshes of any size work in one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.built import Built, Product, Source, Use
from paddle_rbt_plugin.completion.distributed_ops import (
    attr_placement,
    building_pir,
    call_op,
    finished,
    placement_of,
    producer_of,
    result_attrs,
    result_tensors,
    slots_of_results,
    tensor_attr,
    tensor_attrs,
    without_call_stacks,
)
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.question import Operand, Question
from paddle_rbt_plugin.graph.pir import CONSTANT_OPS, CONTAINER_OPS, dtype_name, plain_attrs

_NOT_COMPUTING = (*CONTAINER_OPS, *CONSTANT_OPS, "pd_op.data")
_MOST_OPS = 100
"""Ops after which a scratch program gives way to a new one, since Paddle lists all ops of a block to show the last."""


class ScratchPrograms:
    """The scratch programs of one mesh, or of none, where nothing is distributed. Questions share a program until it is
    large."""

    def __init__(self, mesh: ProcessMesh | None):
        self._mesh = mesh
        self._paddle_mesh: Any = None
        self._inputs: _Inputs | None = None

    def build(self, question: Question) -> tuple[Built, ...]:
        """The op, or the ops of its backward pass. Paddle's errors pass through; they have no common base."""
        with building_pir(), without_call_stacks():
            return self._build(question)

    def result_slots(self, question: Question) -> tuple[str, ...]:
        """The slot of each result of the op."""
        with building_pir(), without_call_stacks():
            return self._asked(question).result_slots()

    def _build(self, question: Question) -> tuple[Built, ...]:
        return self._asked(question).answer()

    def _asked(self, question: Question) -> _Scratch:
        import paddle
        from paddle.base import core

        if self._paddle_mesh is None and self._mesh is not None:
            mesh = self._mesh  # the Python class would make every mesh asked about part of the running job
            self._paddle_mesh = core.ProcessMesh(list(mesh.shape), list(range(mesh.size)), list(mesh.axes))
        if self._inputs is None or self._inputs.program.num_ops() > _MOST_OPS:
            self._inputs = _Inputs(paddle.static.Program(), self._paddle_mesh)
        return _Scratch(self._inputs, question)


class _Inputs:
    """A scratch program with the inputs and the ops made in it so far, which questions share."""

    def __init__(self, program: Any, mesh: Any):
        self.program = program
        self.mesh = mesh
        self._values: dict[tuple[Operand, int], Any] = {}
        self._results: dict[tuple[Any, ...], list[Any]] = {}
        self._elements: dict[str, Any] = {}

    def results(self, question: Question, inputs: Mapping[str, Sequence[Any]]) -> list[Any]:
        """The results of the op asked about; the question about its backward pass builds on the op of the forward one."""
        key = (question.op, question.attrs, question.slots)
        if key not in self._results:
            self._results[key] = [finished(v) for v in call_op(question.op, question.attrs, inputs)]
        return self._results[key]

    def value(self, operand: Operand, number: int) -> Any:
        """A value for an operand; ``number`` tells equal operands of one question apart."""
        if (operand, number) not in self._values:
            self._values[operand, number] = self._make(f"x{len(self._values)}", operand)
        return self._values[operand, number]

    def _make(self, name: str, operand: Operand) -> Any:
        """An argument of the block: it costs a fiftieth of what an op without inputs does."""
        import paddle

        pir = paddle.base.libpaddle.pir
        dense = pir.create_shaped_type(self._element(operand.dtype), list(operand.shape))
        type_ = dense if self.mesh is None else pir.cvt_to_dist_type(dense, tensor_attr(self.mesh, operand.placement))
        value = self.program.global_block().add_kwarg(name, type_)
        value.stop_gradient = operand.stop_gradient
        return value

    def _element(self, dtype: str) -> Any:
        """The type of a tensor of ``dtype``, which Paddle makes for the result of an op only."""
        import paddle
        from paddle.base import core

        if dtype not in self._elements:
            self._elements[dtype] = paddle._C_ops.data(dtype, [1], getattr(paddle, dtype), core.Place()).type()
        return self._elements[dtype]


class _Scratch:
    """One question in the scratch program."""

    def __init__(self, inputs: _Inputs, question: Question):
        self.block = inputs.program.global_block()
        self.inputs = inputs
        self.question = question
        self.met: Counter[Operand] = Counter()
        self.sources: dict[int, Source] = {}  # id of a value -> where it comes from
        self.given: dict[int, Placement] = {}  # id of a value that the question holds -> its placement
        self.locals = 0

    def answer(self) -> tuple[Built, ...]:
        import paddle

        with paddle.static.program_guard(self.inputs.program):
            return self._answer()

    def result_slots(self) -> tuple[str, ...]:
        import paddle

        with paddle.static.program_guard(self.inputs.program):
            inputs = [self._input(o) for o in self.question.operands]
            op = producer_of(self.inputs.results(self.question, self._by_slot(inputs))[0])
        return slots_of_results(op)

    def _answer(self) -> tuple[Built, ...]:
        inputs = [self._input(o) for o in self.question.operands]
        for i, value in enumerate(inputs):
            self.sources[value.id] = Source("input", i)
        results = self.inputs.results(self.question, self._by_slot(inputs))
        op = producer_of(results[0])
        if self.question.gradients is None:
            return (self._describe(op, results),)
        for i, value in enumerate(results):
            self.sources[value.id] = Source("output", i)
        return self._backward(op, results)

    def _backward(self, op: Any, results: Sequence[Any]) -> tuple[Built, ...]:
        import paddle
        from paddle.base import core

        assert self.question.gradients is not None
        if not core.has_vjp(op):  # append_backward passes by what has no derivative, such as full_like
            return ()
        before = len(self.block.ops)
        gradients = []
        for i, (value, placement) in enumerate(zip(results, self.question.gradients, strict=True)):
            if placement is None:  # as append_backward does
                gradients.append(paddle.full_like(value, 0.0, dtype=value.dtype))
                continue
            gradient = self._input(Operand(tuple(value.shape), dtype_name(value.dtype), placement, False))
            self.sources[gradient.id] = Source("gradient", i)
            gradients.append(gradient)
        operands = [_elements(v) for v in op.operands_source()]
        semantics = op.get_input_grad_semantics()
        outputs = _group(results, op)
        input_gradients = core.call_vjp(
            op,
            operands,
            outputs,
            _group(gradients, op),
            [[v.stop_gradient for v in vs] for vs, wanted in zip(operands, semantics, strict=True) if wanted],
        )
        wanted = [v for vs, w in zip(operands, semantics, strict=True) if w for v in vs]
        gradient_of = {
            gradient.id: self.sources[value.id].index
            for value, gradient in zip(wanted, (g for gs in input_gradients for g in gs), strict=True)
            if gradient is not None and gradient.initialized() and value.id in self.sources
        }
        return tuple(
            self._describe(new, [v for r in new.results() for v in result_tensors(r)], gradient_of)
            for new in self.block.ops[before:]
            if new.name() not in _NOT_COMPUTING and not _is_unread_zero(new)
        )

    def _input(self, operand: Operand) -> Any:
        self.met[operand] += 1
        value = self.inputs.value(operand, self.met[operand])
        self.given[value.id] = operand.placement
        return value

    def _by_slot(self, values: Sequence[Any]) -> dict[str, list[Any]]:
        remaining = iter(values)
        return {slot: [next(remaining) for _ in operands] for slot, operands in self.question.slots}

    def _describe(self, op: Any, results: Sequence[Any], gradient_of: Mapping[int, int] | None = None) -> Built:
        """``gradient_of`` says of a gradient op which of its results is the gradient of which input."""
        attr = op.dist_attr
        uses = []
        for i, operand in enumerate(op.operands_source()):
            needs = tensor_attrs(attr.operand(i)) if attr is not None and i < attr.num_operands() else []
            for k, value in enumerate(_elements(operand)):
                if value.initialized() and value.id in self.sources:
                    have = self.given.get(value.id) or placement_of(value)
                    need = attr_placement(needs[k], len(value.shape)) if k < len(needs) else have
                    reads = gradient_of is None or not op.is_no_need_buffer(value)
                    uses.append(Use(self.sources[value.id], tuple(value.shape), dtype_name(value.dtype), have, need, reads))
        made = result_attrs(op)
        products = []
        for i, value in enumerate(results):
            if not value.initialized():
                continue
            kept = placement_of(value)
            products.append(
                Product(
                    tuple(value.shape),
                    dtype_name(value.dtype),
                    attr_placement(made[i], len(value.shape)) if i < len(made) else kept,
                    kept,
                    gradient_of.get(value.id) if gradient_of else None,
                )
            )
            if value.id not in self.sources:
                self.sources[value.id] = Source("local", self.locals)
                self.locals += 1
        return Built(op.name().split(".", 1)[1].removesuffix("_"), tuple(uses), tuple(products), plain_attrs(op))


def _is_unread_zero(op: Any) -> bool:
    """A zero gradient that the gradient op turned out not to read; Paddle removes it from the program."""
    return op.name() == "pd_op.full_like" and op.result(0).use_empty()


def _elements(value: Any) -> list[Any]:
    if value is None or not value.initialized():
        return [value]
    if value.is_combine() and value.get_defining_op().name() == "builtin.combine":
        return list(value.get_defining_op().operands_source())
    return [value]


def _group(values: Sequence[Any], op: Any) -> list[list[Any]]:
    """Groups a flat list of result values by the results of the op."""
    remaining = iter(values)
    return [[next(remaining) for _ in result_tensors(r)] for r in op.results()]
