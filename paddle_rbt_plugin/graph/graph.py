"""The data-flow graph of a serial forward program, free of any IR.

A graph is a sequence of ops in program order and a sequence of tensors. Both refer to each other by position, so a graph
is plain data: it can be compared, cut, repeated and hashed. Constants that Paddle feeds through operands (shapes, axes,
scalars) are folded into ``Op.attrs`` by the readers; every operand that remains is a real tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.graph.batch import Batch, find_batch
from paddle_rbt_plugin.graph.random_ops import draws
from paddle_rbt_plugin.notes import Note

TensorKind = Literal["param", "data", "var"]

DTYPE_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "float32": 4,
    "int64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """A value of the program.

    ``name`` is the parameter's or the feed's own name; for an intermediate value it is made of the op that writes it and
    the output slot (``matmul_3.out``). It is unique in a graph and the same in every process that traces the same model.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: TensorKind
    stop_gradient: bool = False
    structured_name: str = ""
    """For a parameter of a Layer, its path in ``named_parameters()``; empty where no Layer is known."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        n = 1
        for d in self.shape:
            n *= d
        return n

    @property
    def nbytes(self) -> int:
        """Size in bytes of the whole tensor."""
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Op:
    """One operation. ``inputs`` and ``outputs`` map slot names, in Paddle's order, to tensor positions; a slot holds
    several tensors where Paddle takes a list (``concat``) and none where an optional operand is absent."""

    index: int
    name: str
    """Unique in the graph: the canonical type and a running number, ``matmul_3``."""
    type: str
    """Canonical name: ``matmul`` for ``pd_op.matmul``, ``matmul_v2`` and ``matmul``."""
    inputs: Mapping[str, tuple[int, ...]]
    outputs: Mapping[str, tuple[int, ...]]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    """Plain values only: bool, int, float, str, None, and tuples of them; a dtype is its name, ``"float32"``."""
    scope: str = ""
    """The Layer the op came from (``/GPT/Layer_1/Attn/Linear_3/``), where the program says so."""
    source: int = -1
    """Position of the op in the block that was read."""

    @cached_property
    def operands(self) -> tuple[int, ...]:
        """Input tensors in order, lists flattened."""
        return tuple(t for slot in self.inputs.values() for t in slot)

    @cached_property
    def results(self) -> tuple[int, ...]:
        """Output tensors in order, lists flattened."""
        return tuple(t for slot in self.outputs.values() for t in slot)

    @cached_property
    def spelt_attrs(self) -> tuple[tuple[str, str], ...]:
        """The attributes as text, by name: equal for attributes of equal values and types."""
        return tuple([(name, repr(value)) for name, value in sorted(self.attrs.items())])


WeightPrecision = Literal["fp32", "fp16", "bf16"]
_PRECISIONS: Mapping[str, WeightPrecision] = {"float16": "fp16", "bfloat16": "bf16"}


class Graph:
    """Ops and tensors of one forward program; ``loss`` is the position of the scalar that training minimises.

    ``batch`` is what the caller said of the samples; without it, it is found in the shapes. ``assumed`` says what was assumed
    of values that the program depends on: such a graph is planned, but no program is handed over with its plan."""

    def __init__(
        self,
        tensors: tuple[Tensor, ...],
        ops: tuple[Op, ...],
        loss: int | None = None,
        batch: Batch | None = None,
        assumed: tuple[Note, ...] = (),
    ):
        self.tensors = tensors
        self.ops = ops
        self.loss = loss
        self._stated_batch = batch
        self.assumed = assumed

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    @property
    def params(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors if t.kind == "param")

    @property
    def data(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors if t.kind == "data")

    @cached_property
    def weight_precision(self) -> WeightPrecision:
        """The precision of most elements of the parameters that are trained, or of all where none is."""
        elements: dict[WeightPrecision, int] = {"fp32": 0, "fp16": 0, "bf16": 0}
        for t in [t for t in self.params if not t.stop_gradient] or self.params:
            elements[_PRECISIONS.get(t.dtype, "fp32")] += t.numel
        return max(elements, key=elements.__getitem__)

    @cached_property
    def batch(self) -> Batch:
        """The samples, and the inputs that hold them. Raises UnsupportedProgram for a program without data."""
        results = (self.tensors[t].shape for op in self.ops for t in op.results)
        found = self._stated_batch or find_batch({t.name: t.shape for t in self.data}, results)
        if found is None:
            raise UnsupportedProgram("the program has no data input with a batch dimension; give it inputs that hold samples")
        return found

    def rewritten(self, tensors: tuple[Tensor, ...], ops: tuple[Op, ...], loss: int | None) -> Graph:
        """The same program with other ops in between: the inputs and their batch stay."""
        return Graph(tensors, ops, loss, self._stated_batch, self.assumed)

    def with_batch(self, batch: Batch | None) -> Graph:
        """The graph of a program of which the caller says what the batch is; None leaves that to the shapes."""
        return Graph(self.tensors, self.ops, self.loss, batch, self.assumed)

    def assuming(self, *notes: Note) -> Graph:
        """The graph of a program whose values were assumed."""
        return Graph(self.tensors, self.ops, self.loss, self._stated_batch, notes)

    def op_inputs(self, op: Op) -> tuple[Tensor, ...]:
        return tuple(self.tensors[i] for i in op.operands)

    def op_outputs(self, op: Op) -> tuple[Tensor, ...]:
        return tuple(self.tensors[i] for i in op.results)

    @cached_property
    def _producers(self) -> dict[int, int]:
        return {t: op.index for op in self.ops for t in op.results}

    @cached_property
    def _consumers(self) -> dict[int, tuple[int, ...]]:
        users: dict[int, list[int]] = {}
        for op in self.ops:
            for t in dict.fromkeys(op.operands):
                users.setdefault(t, []).append(op.index)
        return {t: tuple(ops) for t, ops in users.items()}

    @cached_property
    def _by_name(self) -> dict[str, int]:
        return {t.name: t.index for t in self.tensors}

    @cached_property
    def constant_ops(self) -> frozenset[int]:
        """Positions of the ops that compute constants: they depend on no input, no parameter and no random number.

        Masks, rotary tables and position ids are mostly made by such ops. A pipeline stage that reads them computes them."""
        constant: set[int] = set()
        for op in self.ops:
            producers = [self._producers.get(t, -1) for t in op.operands]
            if constant.issuperset(producers) and not draws(op.type, op.attrs):
                constant.add(op.index)
        return frozenset(constant)

    @cached_property
    def _externals(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        return {}

    @cached_property
    def _results(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        return {}

    def results(self, ops: tuple[int, ...]) -> tuple[int, ...]:
        """The tensors that some ops write, in program order."""
        if ops not in self._results:
            self._results[ops] = tuple(t for op in ops for t in self.ops[op].results)
        return self._results[ops]

    def externals(self, ops: tuple[int, ...]) -> tuple[int, ...]:
        """The tensors that some ops read and do not write, in the order of first use."""
        if ops not in self._externals:
            written = {t for op in ops for t in self.ops[op].results}
            read = dict.fromkeys(t for op in ops for t in self.ops[op].operands)
            self._externals[ops] = tuple(t for t in read if t not in written)
        return self._externals[ops]

    def producer(self, tensor: int) -> Op | None:
        """The op that writes a tensor; None for parameters and data."""
        index = self._producers.get(tensor)
        return None if index is None else self.ops[index]

    def consumers(self, tensor: int) -> tuple[Op, ...]:
        """The ops that read a tensor, in program order, each once."""
        return tuple(self.ops[i] for i in self._consumers.get(tensor, ()))

    def reader_count(self, tensor: int) -> int:
        """How many ops read a tensor."""
        return len(self._consumers.get(tensor, ()))

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name. Raises KeyError."""
        return self.tensors[self._by_name[name]]

    @cached_property
    def signature(self) -> str:
        """Hash of what training the program depends on: op types, attributes, wiring, shapes and dtypes, which operands an op
        has, which parameters are trained, and where gradients end.

        Names and scopes do not count, so the same model built twice in one process, or traced in another one, has the same
        signature. Neither does ``stop_gradient`` of data, which differs between the ways to trace a model."""
        tensors = [[t.kind, t.shape, t.dtype, *([t.stop_gradient] if t.kind == "param" else [])] for t in self.tensors]
        ops = [[*_structure(op), _slots(op), ends] for op, ends in zip(self.ops, self._ends_gradient(), strict=True)]
        return _hash([tensors, ops, self.loss, *map(str, self.assumed)])

    @cached_property
    def structure_signature(self) -> str:
        """The signature as plans were saved with before it covered gradients and operand slots: the same for a model whose
        parameters are frozen and for one that trains them."""
        return _hash([[[t.kind, t.shape, t.dtype] for t in self.tensors] + [_structure(op) for op in self.ops], self.loss])

    def _ends_gradient(self) -> Iterator[bool]:
        """Per op, whether gradients that would reach its operands end at it: it is detached, or run under ``no_grad``."""
        trained = {t.index for t in self.params if not t.stop_gradient}
        for op in self.ops:
            floating = [t for t in self.op_outputs(op) if t.dtype.startswith(("float", "bfloat", "complex"))]
            reached = not trained.isdisjoint(op.operands)
            ends = reached and bool(floating) and all(t.stop_gradient for t in floating)
            if reached and not ends:
                trained.update(t.index for t in floating)
            yield ends


def _structure(op: Op) -> list[object]:
    return [op.type, op.operands, op.results, op.spelt_attrs]


def _slots(op: Op) -> list[int]:
    """How many operands each slot holds, by position, since versions of Paddle name slots differently; absent operands at the
    end do not count, since versions add some."""
    sizes = [len(operands) for operands in op.inputs.values()]
    while sizes and not sizes[-1]:
        sizes.pop()
    return sizes


def _hash(lines: list[object]) -> str:
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:32]
