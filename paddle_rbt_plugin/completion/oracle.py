"""Asks Paddle what an op does with the placements of its inputs.

The question is put the way execution puts it: in a scratch PIR program the inputs are given distributed types, the op is
built through ``paddle._C_ops``, and the distributed attributes of the new op say what its operands must become and how its
results lie. The backward answer comes from ``call_vjp`` on that op, which builds the gradient ops Paddle would build.
No process group and no device is needed, and meshes of any size work in one process.

Answers depend only on the question, so each is asked once (a third of a millisecond) and remembered by the oracle, and from
one run to the next by a cache (``answers``).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.operands import less_sharded, whole_along, wrongly_summed
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.graph.cpp_signatures import Argument, signature
from paddle_rbt_plugin.graph.pir import CONSTANT_OPS, CONTAINER_OPS, dtype_name, plain_attrs
from paddle_rbt_plugin.graph.random_ops import draws_whole

_NOT_COMPUTING = (*CONTAINER_OPS, *CONSTANT_OPS, "pd_op.data")
_MOST_OPS = 100
"""Ops after which a scratch program gives way to a new one, since Paddle lists all ops of a block to show the last."""
_HALF = frozenset({"float16", "bfloat16"})

GRADIENTS_MAY_BE_PARTIAL = frozenset({"cast", "reshard"})
"""Ops whose gradient ops may read partial gradients; all others get whole sums (see ``finished``). So the gradient of a
parameter that is cast is summed once a step, as that of any parameter."""


class Operand(NamedTuple):
    """An input as it arrives at the op."""

    shape: tuple[int, ...]
    dtype: str
    placement: Placement
    stop_gradient: bool


class Question(NamedTuple):
    """An op with its inputs by slot, and for the backward pass the placements in which the gradients of its results arrive,
    None for a result without one."""

    op: str
    attrs: tuple[tuple[str, Any], ...]
    slots: tuple[tuple[str, tuple[Operand, ...]], ...]
    gradients: tuple[Placement | None, ...] | None = None
    results: tuple[tuple[tuple[int, ...], str], ...] = ()
    """Shape and dtype of each result, where the graph knows them; an op that is built says so itself."""

    @property
    def operands(self) -> tuple[Operand, ...]:
        return tuple(o for _, slot in self.slots for o in slot)


@dataclass(frozen=True)
class Source:
    """Where an operand of a built op comes from: ``input``, ``output`` or ``gradient`` (of an output) number ``index`` of the
    question, or ``local``: result ``index`` counted over all built ops."""

    kind: str
    index: int


class Use(NamedTuple):
    """One operand of a built op: as it is, and as the op needs it."""

    source: Source
    shape: tuple[int, ...]
    dtype: str
    have: Placement
    need: Placement
    reads: bool = True
    """False where a gradient op wants the shape only, so the values need not be kept."""


class Product(NamedTuple):
    """One result of a built op: as the op makes it, and as its readers get it."""

    shape: tuple[int, ...]
    dtype: str
    made: Placement
    kept: Placement
    gradient_of: int | None = None
    """The input whose gradient it is."""


@dataclass(frozen=True)
class Built:
    """An op that Paddle built for a question."""

    type: str
    uses: tuple[Use, ...]
    products: tuple[Product, ...]
    attrs: Mapping[str, Any]


class Remembered(Protocol):
    """What is known of a mesh from other runs, see ``answers.MeshAnswers``."""

    def find(self, question: Question) -> tuple[Built, ...] | None: ...

    def keep(self, question: Question, answer: Sequence[Built] | UnsupportedProgram) -> None: ...


class Oracle:
    """Answers for one arrangement of a mesh; only its shape matters, not which ranks it holds. ``remembered`` answers what it
    can, and is told the rest."""

    def __init__(self, mesh: ProcessMesh, remembered: Remembered | None = None):
        self.mesh = mesh
        self._remembered = remembered
        self._answers: dict[Question, tuple[Built, ...]] = {}
        self._placements: dict[Question, tuple[Placement, ...] | None] = {}
        self._inputs: _Inputs | None = None

    def forward(self, question: Question) -> Built:
        """The op itself. Raises UnsupportedProgram when Paddle cannot build it."""
        return self._ask(question)[0]

    def backward(self, question: Question) -> tuple[Built, ...]:
        """The ops of its backward pass in order, the zeros for missing gradients included."""
        return self._ask(question)

    def _ask(self, question: Question) -> tuple[Built, ...]:
        if question not in self._answers:
            found = self._remembered.find(question) if self._remembered else None
            self._answers[question] = self._answer(question) if found is None else found
        return self._answers[question]

    def _answer(self, question: Question) -> tuple[Built, ...]:
        try:
            brought = self._brought(question._replace(gradients=None, results=()))
            answer = self._build(question) if brought is None else self._of_brought(question, brought)
        except UnsupportedProgram as error:
            if self._remembered:
                self._remembered.keep(question, error)
            raise
        if self._remembered:
            self._remembered.keep(question, answer)
        return answer

    def _brought(self, forward: Question) -> tuple[Placement, ...] | None:
        """The placements to which an op brings its operands before it is built: all whole for one that has to draw its whole
        result on every rank and would draw shards, others for one that Paddle does not build right on operands that lie so
        (``operands``). None for an op that is built as it stands."""
        if forward not in self._placements:
            self._placements[forward] = self._find_brought(forward)
        return self._placements[forward]

    def _find_brought(self, forward: Question) -> tuple[Placement, ...] | None:
        given = tuple(o.placement for o in forward.operands)
        try:
            built = self._build(forward)[0]
        except UnsupportedProgram:
            others = less_sharded(given)
            for other in others[:-1]:
                with suppress(UnsupportedProgram):
                    self._build(_placed(forward, other))
                    return other
            return others[-1] if others else None
        made = [product.made for product in built.products]
        if draws_whole(forward.op, dict(forward.attrs)) and any(placement.is_sharded() for placement in made) and given:
            return less_sharded(given)[-1]
        axes = wrongly_summed(built.type, made)
        return whole_along(given, axes) if axes else None

    def _of_brought(self, question: Question, placements: tuple[Placement, ...]) -> tuple[Built, ...]:
        """The answer for operands of these placements as one for those of ``question``, which the op brings there itself."""
        built = self._build(_placed(question, placements))
        if question.gradients is not None:
            return tuple(replace(b, products=tuple(_taken_back(p, question) for p in b.products)) for b in built)
        uses = (u._replace(have=question.operands[u.source.index].placement) for u in built[0].uses)
        return (replace(built[0], uses=tuple(uses)),)

    @cached_property
    def _paddle_mesh(self) -> Any:
        from paddle.base import core

        # The Python class would make every mesh asked about part of the running job.
        return core.ProcessMesh(list(self.mesh.shape), list(range(self.mesh.size)), list(self.mesh.axes))

    def _build(self, question: Question) -> tuple[Built, ...]:
        try:
            with building_pir(), _without_call_stacks():
                return self._scratch(question)
        except UnsupportedProgram:
            raise
        except Exception as error:  # Paddle's own exceptions have no common base
            half = {o.dtype for o in question.operands} & _HALF
            if half:
                return _with_dtype(self._build(_in_float32(question)), half.pop())
            shapes = ", ".join(str(list(o.shape)) for o in question.operands)
            raise UnsupportedProgram(
                f"Paddle cannot build {question.op!r} on inputs of shape {shapes} placed as "
                f"{[o.placement.dims_mapping for o in question.operands]}: {str(error).strip().splitlines()[-1]}"
            ) from error

    def _scratch(self, question: Question) -> tuple[Built, ...]:
        import paddle

        if self._inputs is None or self._inputs.program.num_ops() > _MOST_OPS:
            self._inputs = _Inputs(paddle.static.Program(), self._paddle_mesh)
        with paddle.static.program_guard(self._inputs.program):
            return _Scratch(self._inputs, question).answer()


def _taken_back(product: Product, question: Question) -> Product:
    """A gradient of an operand that was brought elsewhere, as it arrives where the operand lies."""
    if product.gradient_of is None:
        return product
    return product._replace(kept=product.made.of_gradient(question.operands[product.gradient_of].placement))


def _placed(question: Question, placements: Sequence[Placement]) -> Question:
    """The question about operands of these placements."""
    others = iter(placements)
    slots = tuple((slot, tuple(o._replace(placement=next(others)) for o in operands)) for slot, operands in question.slots)
    return question._replace(slots=slots)


def _in_float32(question: Question) -> Question:
    """The same question of float32: Paddle refuses ops for which its wheel has no kernel, and CPU wheels lack some of half
    precision (the gradient of a softmax); placements do not depend on it."""
    slots = tuple(
        (slot, tuple(o._replace(dtype="float32") if o.dtype in _HALF else o for o in operands))
        for slot, operands in question.slots
    )
    return question._replace(slots=slots)


def _with_dtype(answers: Sequence[Built], dtype: str) -> tuple[Built, ...]:
    """The answers to such a question, in the precision that was asked for."""

    def in_dtype(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(v._replace(dtype=dtype) if v.dtype == "float32" else v for v in values)

    return tuple(replace(b, uses=in_dtype(b.uses), products=in_dtype(b.products)) for b in answers)


@contextmanager
def building_pir() -> Iterator[None]:
    """Ops built inside go to PIR programs, whatever mode the process is in; every mode is put back afterwards."""
    import paddle

    if paddle.framework.in_pir_mode():
        yield
        return
    was_dynamic = paddle.in_dynamic_mode()
    paddle.enable_static()
    try:
        with paddle.pir_utils.IrGuard():
            yield
    finally:
        if was_dynamic:
            paddle.disable_static()


@contextmanager
def _without_call_stacks() -> Iterator[None]:
    """Ops built inside do not record where in Python they were built, which takes Paddle longer than building them.
    It asks ``traceback.extract_stack``, which heeds this limit."""
    limit = getattr(sys, "tracebacklimit", None)
    sys.tracebacklimit = 0
    try:
        yield
    finally:
        if limit is None:
            del sys.tracebacklimit
        else:
            sys.tracebacklimit = limit


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
        value = self.program.global_block().add_kwarg(
            name, pir.cvt_to_dist_type(dense, tensor_attr(self.mesh, operand.placement))
        )
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
            self._describe(new, [v for r in new.results() for v in _results(r)], gradient_of)
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
            needs = _tensor_attrs(attr.operand(i)) if attr is not None and i < attr.num_operands() else []
            for k, value in enumerate(_elements(operand)):
                if value.initialized() and value.id in self.sources:
                    have = self.given.get(value.id) or placement_of(value)
                    need = _placement(needs[k], len(value.shape)) if k < len(needs) else have
                    reads = gradient_of is None or not op.is_no_need_buffer(value)
                    uses.append(Use(self.sources[value.id], tuple(value.shape), dtype_name(value.dtype), have, need, reads))
        made = _result_attrs(op)
        products = []
        for i, value in enumerate(results):
            if not value.initialized():
                continue
            kept = placement_of(value)
            products.append(
                Product(
                    tuple(value.shape),
                    dtype_name(value.dtype),
                    _placement(made[i], len(value.shape)) if i < len(made) else kept,
                    kept,
                    gradient_of.get(value.id) if gradient_of else None,
                )
            )
            if value.id not in self.sources:
                self.sources[value.id] = Source("local", self.locals)
                self.locals += 1
        return Built(op.name().split(".", 1)[1].removesuffix("_"), tuple(uses), tuple(products), plain_attrs(op))


def call_op(name: str, attrs: Iterable[tuple[str, Any]], inputs: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Builds an op in the current program from its inputs by slot and its plain attributes; returns all of its results.

    Raises UnsupportedProgram for an op that the installed Paddle does not list."""
    from paddle.base import core

    function, arguments = _function(name)
    values = dict(attrs)
    args: list[Any] = []
    for argument in arguments:
        given = inputs.get(argument.name)
        if given is not None and argument.kind == "tensor":
            args.append(list(given) if "vector" in argument.type else (given[0] if given else None))
        elif given:
            args.append(given[0])
        elif "Place" in argument.type:
            args.append(core.Place())
        elif "DataType" in argument.type:
            args.append(_dtype(values[argument.name]))
        else:
            value = values[argument.name]
            args.append(list(value) if isinstance(value, tuple) else value)
    if name in _COUNTED_FROM_THE_FRONT:
        args[1] = _number(args[1]) % len(args[0].shape)
    built = function(*args)
    first = next(v for v in (built if isinstance(built, (list, tuple)) else [built]) if v is not None)
    return [v for r in producer_of(first).results() for v in _results(r)]


_COUNTED_FROM_THE_FRONT = frozenset({"cumsum"})
"""Ops whose second argument is a dimension that Paddle's sharding rule reads out of bounds where it is negative."""


def _number(value: Any) -> int:
    """A number that an op takes as an attribute or as the result of a constant op."""
    return value if isinstance(value, int) else int(value.get_defining_op().attrs()["value"])


def _function(name: str) -> tuple[Any, tuple[Argument, ...]]:
    """The function that builds an op, and its arguments; an op that works in place may be listed under its plain name."""
    import paddle

    for spelling in (name, f"{name}_"):
        function = getattr(paddle._C_ops, spelling, None)
        arguments = signature(spelling) or signature(spelling.removesuffix("_"))
        if function is not None and arguments is not None:
            return function, arguments
    raise UnsupportedProgram(
        f"the op {name!r} cannot be built again: Paddle {paddle.__version__} does not list its arguments; of a custom op a "
        "plugin says which op of Paddle it computes (register_op_names)"
    )


def producer_of(value: Any) -> Any:
    """The op that computes a value, looking through the container that splits a list of results."""
    op = value.get_defining_op()
    return op.operand_source(0).get_defining_op() if op.name() == "builtin.split" else op


def made_by(op: Any) -> list[Placement]:
    """How a built op makes its results."""
    results = [v for r in op.results() for v in _results(r)]
    return [_placement(a, len(value.shape)) for a, value in zip(_result_attrs(op), results, strict=False)]


def set_placement(value: Any, mesh: Any, placement: Placement) -> None:
    """Gives a dense PIR value a distributed type on Paddle's ``mesh``, and its op the matching attribute."""
    import paddle

    pir = paddle.base.libpaddle.pir
    attr = tensor_attr(mesh, placement)
    value.set_type(pir.cvt_to_dist_type(value.type(), attr))
    value.get_defining_op().dist_attr = pir.create_op_dist_attribute(mesh, [], [attr])


def finished(value: Any) -> Any:
    """A PIR value that its op leaves partial as its readers get it: whole sums. The type of the value says so, while the op
    keeps its attribute; where the two differ Paddle's partition pass communicates, right after the op.

    No reader is given partial values, since the rules of many ops are wrong for them: they move summands as if those were
    values (concat), read in the gradient op a summand where the forward op read the sum (layer_norm), or give the gradient of
    a sum the placement of a summand."""
    return placed(value, placement_of(value).finished())


def placed(value: Any, placement: Placement) -> Any:
    """A PIR value as ``placement`` says, by which its readers are built from now on, see ``finished``."""
    import paddle

    if placement == placement_of(value):
        return value
    attr = tensor_attr(value.process_mesh, placement)
    if value.get_defining_op().name() in CONTAINER_OPS:  # which the partition pass passes by
        return paddle._C_ops.reshard_v2(value, attr)
    value.set_type(paddle.base.libpaddle.pir.cvt_to_dist_type(value.type(), attr))
    return value


def tensor_attr(mesh: Any, placement: Placement) -> Any:
    """Paddle's attribute of a tensor that lies so on ``mesh``."""
    import paddle
    from paddle.distributed import ReduceType

    partial = {axis: getattr(ReduceType, f"kRed{reduction.capitalize()}") for axis, reduction in placement.partial}
    return paddle.base.libpaddle.pir.create_tensor_dist_attribute(mesh, list(placement.dims_mapping), partial)


def placement_of(value: Any) -> Placement:
    """Placement of a PIR value; a value without a distributed type lies whole on every rank."""
    return _placement(value.dist_attr(), len(value.shape)) if value.is_dist() else Placement.replicated(len(value.shape))


def _placement(attr: Any, ndim: int) -> Placement:
    if attr is None:
        return Placement.replicated(ndim)
    status = attr.partial_status
    partial = sorted((axis, kind.name.removeprefix("kRed").lower()) for axis, kind in status.items()) if status else ()
    return Placement(tuple(attr.dims_mapping), tuple(partial))


def _result_attrs(op: Any) -> list[Any]:
    """The distributed attributes of what a built op makes, one per tensor."""
    attr = op.dist_attr
    return [a for i in range(op.num_results()) for a in (_tensor_attrs(attr.result(i)) if attr is not None else ())]


def _tensor_attrs(attr: Any) -> list[Any]:
    """The distributed attributes of an operand or a result, one per tensor it holds; empty for an absent one."""
    array = attr.as_array_attr() if attr else None
    if array is not None:
        return [array[i].as_tensor_dist_attr() for i in range(len(array))]
    tensor = attr.as_tensor_dist_attr() if attr else None
    return [] if tensor is None else [tensor]


def _is_unread_zero(op: Any) -> bool:
    """A zero gradient that the gradient op turned out not to read; Paddle removes it from the program."""
    return op.name() == "pd_op.full_like" and op.result(0).use_empty()


def _elements(value: Any) -> list[Any]:
    if value is None or not value.initialized():
        return [value]
    if value.is_combine() and value.get_defining_op().name() == "builtin.combine":
        return list(value.get_defining_op().operands_source())
    return [value]


def _results(result: Any) -> list[Any]:
    """The tensors of a result: those of the container that splits it, where it is a list."""
    if result.initialized() and result.is_combine():
        users = result.all_used_ops()
        return list(users[0].results()) if users else []
    return [result]


def _group(values: Sequence[Any], op: Any) -> list[list[Any]]:
    """Groups a flat list of result values by the results of the op."""
    remaining = iter(values)
    return [[next(remaining) for _ in _results(r)] for r in op.results()]


def _dtype(name: str) -> Any:
    import paddle
    from paddle.base import core

    return core.DataType.UNDEFINED if name == "undefined" else getattr(paddle, name)
