"""Reads a PIR program into a graph."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.graph.cpp_signatures import ArgumentKind, signature
from paddle_rbt_plugin.graph.graph import Graph, Op, Tensor, TensorKind

# Containers of the IR: they carry lists of values and compute nothing.
CONTAINER_OPS = ("builtin.combine", "builtin.split", "builtin.slice")
# Where values leave the program.
SINK_OPS = ("builtin.shadow_output", "builtin.set_parameter")
# What a linear layer with a bias is on CUDA builds of Paddle 3.3.
LINEAR = "linear_v2"
CONSTANT_OPS = ("pd_op.full_int_array", "pd_op.full")
_CONTROL_FLOW = ("pd_op.if", "pd_op.while", "pd_op.pylayer", "cf.")
# Numbers of the recomputed regions, with which ``recompute`` in a model marks its ops.
RECOMPUTE_MARKS = ("fwd_recompute_id", "bwd_recompute_id")
# Attributes that say nothing about what an op computes.
_BOOKKEEPING = frozenset(
    {"stop_gradient", "op_callstack", "struct_name", "op_role", "chunk_id", "place", "is_persistable", "op_dist_attr"}
    | {"persistable", "is_persisable", "mkldnn_data_type", "onednn_data_type", "use_mkldnn", "use_quantizer"}
    | {*RECOMPUTE_MARKS}
)
OF_VALUES = (
    "rbt.tune(layer, ...) plans a Layer that chooses experts by value under a balanced load; to train it, write its experts "
    "with stacked weights [experts, in, out] and a fixed capacity"
)
"""What to do about a program that depends on values."""
_FORWARD_ROLES = (-1, 0, 256)  # unset, OpRole.Forward, OpRole.Forward | OpRole.Loss


@cache
def dtype_name(dtype: Any) -> str:
    """``"float32"`` for ``paddle.float32`` and ``DataType.FLOAT32``."""
    return str(dtype).rsplit(".", 1)[-1].lower()


def plain_attrs(op: Any) -> dict[str, Any]:
    """The attributes of a PIR op as plain, comparable values; bookkeeping left out."""
    return _plain_values(op.attrs())


def _plain_values(attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _plain(v) for k, v in attrs.items() if k not in _BOOKKEEPING}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_plain(v) for v in value)
    return dtype_name(value)


def read_pir_program(
    program: Any, loss: Any = None, structured_names: Mapping[str, str] | None = None, needs_loss: bool = True
) -> Graph:
    """Graph of a serial forward PIR program; see ``read_program``."""
    check_serial_forward(list(program.global_block().ops))
    return Reader(program, structured_names or {}).read(loss, needs_loss)


class Reader:
    """One reading of a PIR program, traced or translated from a legacy one."""

    def __init__(self, program: Any, structured_names: Mapping[str, str]):
        self.ops_in = list(program.global_block().ops)
        self.names = [op.name() for op in self.ops_in]
        self.operands = [op.operands_source() for op in self.ops_in]
        self.structured_names = structured_names
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.index_of: dict[int, int] = {}  # id of a PIR value -> tensor
        self.counts: dict[str, int] = {}
        self.slots: dict[str, tuple[list[str], list[str]]] = {}  # type of an op -> names of its operands and results
        self.params: dict[int, Any] = {}  # id of a PIR value -> builtin.parameter; read at first use
        self.users = self._users()

    def read(self, loss: Any, needs_loss: bool) -> Graph:
        for source, (op, name) in enumerate(zip(self.ops_in, self.names, strict=True)):
            if name == "builtin.parameter":
                self.params[op.result(0).id] = op
            elif name == "pd_op.data":
                self._tensor(op.result(0), op.attrs()["name"], "data")
            elif name in CONTAINER_OPS or name in SINK_OPS or (name in CONSTANT_OPS and self._is_folded(op)):
                continue
            elif name == f"pd_op.{LINEAR}":
                self._linear(source, op)
            else:
                self._op(source, op)
        for value_id, op in self.params.items():  # parameters that nothing reads are still held in memory
            if value_id not in self.index_of:
                self._parameter(op)
        return Graph(tuple(self.tensors), tuple(self.ops), self._loss(loss) if needs_loss else None)

    def _is_folded(self, constant: Any) -> bool:
        """True when every use of the constant is an attribute of its user."""
        return all(kind == "constant" for _, kind in self.users.get(constant.result(0).id, ()))

    def _tensor(self, value: Any, name: str, kind: TensorKind) -> int:
        shape = tuple(int(n) for n in value.shape)
        if value.use_empty():  # scratch space of some kernels has no size until they run (batch_norm)
            shape = tuple(max(n, 0) for n in shape)
        if any(n < 0 for n in shape):
            raise UnsupportedProgram(
                f"tensor {name!r} has the dynamic shape {list(shape)}; give every dimension of the input_spec a size, "
                "the batch dimension included. A program with shapes that depend on values, as of masked_select or of the "
                "tokens that a router sends to an expert, can be neither planned nor handed over; " + OF_VALUES
            )
        index = len(self.tensors)
        self.tensors.append(
            Tensor(
                index,
                name,
                shape,
                dtype_name(value.dtype),
                kind,
                stop_gradient=bool(value.stop_gradient),
                structured_name=self.structured_names.get(name, "") if kind == "param" else "",
            )
        )
        self.index_of[value.id] = index
        return index

    def _parameter(self, op: Any) -> int:
        return self._tensor(op.result(0), op.result(0).name, "param")

    def _operand(self, value: Any) -> int:
        index = self.index_of.get(value.id)
        return self._parameter(self.params[value.id]) if index is None else index

    def _op(self, source: int, op: Any) -> None:
        op_name = self.names[source]
        type_ = op_name.split(".", 1)[1].removesuffix("_")
        name = self._numbered(type_)
        stored = op.attrs()  # a copy with the stack of the caller, which takes its time
        attrs = _plain_values(stored)
        inputs: dict[str, tuple[int, ...]] = {}
        kinds = argument_kinds(op_name)
        slots_in, slots_out = self._slots(op_name, op)
        for slot, value in zip(slots_in, self.operands[source], strict=True):
            if not is_present(value):
                inputs[slot] = ()
            elif kinds.get(slot) != "constant" and value.id in self.index_of:
                inputs[slot] = (self.index_of[value.id],)
            elif kinds.get(slot) == "constant" and (constant := value.get_defining_op()).name() in CONSTANT_OPS:
                attrs[slot] = constant_value(constant)
            elif is_list(value) and (container := value.get_defining_op()).name() == "builtin.combine":
                inputs[slot] = tuple(self._operand(v) for v in container.operands_source())
            else:
                inputs[slot] = (self._operand(value),)
        outputs = {
            slot: self._results(name, slot, value)
            for slot, value in zip(slots_out, op.results(), strict=True)
            if slot != "xshape"  # where 2.6 keeps a shape for the backward pass
        }
        scope = stored.get("struct_name", "")
        self.ops.append(Op(len(self.ops), name, type_, inputs, outputs, attrs, scope, source))

    def _slots(self, name: str, op: Any) -> tuple[list[str], list[str]]:
        """The names of an op's operands and results, which ops of one type share."""
        if name not in self.slots:
            self.slots[name] = op.get_input_names(), op.get_output_names()
        return self.slots[name]

    def _users(self) -> dict[int, list[tuple[Any, str | None]]]:
        """Per value, by its id, the ops that read it and the kind of argument it is for each; None for a container."""
        users: dict[int, list[tuple[Any, str | None]]] = {}
        known: dict[str, list[str | None]] = {}
        for op, name, operands in zip(self.ops_in, self.names, self.operands, strict=True):
            if name.startswith("builtin."):
                kinds: list[str | None] = [None] * len(operands)
            else:
                if name not in known:
                    known[name] = [argument_kinds(name).get(slot, "tensor") for slot in self._slots(name, op)[0]]
                kinds = known[name]
            for value, kind in zip(operands, kinds, strict=True):
                if is_present(value):
                    users.setdefault(value.id, []).append((op, kind))
        return users

    def _numbered(self, type_: str) -> str:
        number = self.counts.get(type_, 0)
        self.counts[type_] = number + 1
        return f"{type_}_{number}"

    def _linear(self, source: int, op: Any) -> None:
        """Reads a ``LINEAR`` as the product and the addition that other builds make of the layer, so that one plan fits all."""
        x, weight, bias = op.operands_source()
        result, stored = op.result(0), op.attrs()
        scope = stored.get("struct_name", "")
        name = self._numbered("matmul")
        inputs = {"x": (self._operand(x),), "y": (self._operand(weight),)}
        product = len(self.tensors)
        shape, dtype = tuple(int(n) for n in result.shape), dtype_name(result.dtype)
        stop = bool(x.stop_gradient and weight.stop_gradient)
        self.tensors.append(Tensor(product, f"{name}.out", shape, dtype, "var", stop_gradient=stop))
        attrs = {"transpose_x": False, "transpose_y": stored["transpose_weight"]}
        self.ops.append(Op(len(self.ops), name, "matmul", inputs, {"out": (product,)}, attrs, scope, source))
        name = self._numbered("add")
        inputs = {"x": (product,), "y": (self._operand(bias),)}
        outputs = {"out": self._results(name, "out", result)}
        self.ops.append(Op(len(self.ops), name, "add", inputs, outputs, {}, scope, source))

    def _results(self, op: str, slot: str, value: Any) -> tuple[int, ...]:
        if not is_present(value):
            return ()
        if is_list(value):
            parts = self._parts([user for user, _ in self.users.get(value.id, ())])
            return tuple(self._tensor(part, f"{op}.{slot}{i}", "var") for i, part in enumerate(parts))
        return (self._tensor(value, f"{op}.{slot}", "var"),)

    @staticmethod
    def _parts(users: list[Any]) -> list[Any]:
        """The tensors of a list: those of the container that splits it, or of one container for each."""
        if users and users[0].name() == "builtin.slice":
            return [user.result(0) for user in sorted(users, key=lambda user: user.attrs()["index"])]
        return list(users[0].results()) if users else []

    def _loss(self, loss: Any) -> int | None:
        if loss is not None:
            if getattr(loss, "id", None) not in self.index_of:
                raise UnsupportedProgram(f"the loss given, {str(loss)[:60]!r}, is not a value of the program")
            return self.index_of[loss.id]
        unread = {t for op in self.ops for t in op.results}.difference(*(op.operands for op in self.ops))
        ends = (self.tensors[t] for t in sorted(unread))
        scalars = [t for t in ends if t.numel == 1 and t.dtype.startswith(("float", "bfloat"))]
        if len(scalars) != 1:
            found = ", ".join(t.name for t in scalars) or "none"
            raise UnsupportedProgram(
                f"the program has no single loss (floating-point scalars that nothing reads: {found}); the forward pass must "
                "end in one scalar loss, or the loss must be named"
            )
        return scalars[0].index


def constant_value(op: Any) -> Any:
    """The value of a constant op; ``full`` keeps its value as a float whatever its dtype."""
    attrs = op.attrs()
    value = _plain(attrs["value"])
    return int(value) if isinstance(value, float) and "int" in dtype_name(attrs["dtype"]) else value


def is_present(value: Any) -> bool:
    """Whether an operand or a result that may be absent is there."""
    if value is None:
        return False
    if hasattr(value, "initialized"):
        return bool(value.initialized())
    try:  # Paddle 2.6 has no other way to ask
        return value.id is not None
    except ValueError:
        return False


def is_list(value: Any) -> bool:
    """Whether a value is a list of tensors."""
    return value.is_combine() if hasattr(value, "is_combine") else str(value.type()).startswith("vec")  # Paddle 2.6 lacks it


@cache
def argument_kinds(op: str) -> Mapping[str, ArgumentKind]:
    """The kind of each argument of an op, by its name."""
    return MappingProxyType({a.name: a.kind for a in signature(op.split(".", 1)[1]) or ()})


def check_serial_forward(ops: list[Any]) -> None:
    """Raises UnsupportedProgram for the ops of a program that is empty, not forward, not static or not serial."""
    compute = [op for op in ops if not op.name().startswith("builtin.") and op.name() != "pd_op.data"]
    if not compute:
        raise UnsupportedProgram(
            "the program is empty: it holds no operation to plan; build the model's forward pass in it first"
        )
    for op in compute:
        name = op.name()
        if name.endswith(("_grad", "_grad_")) or op.op_role not in _FORWARD_ROLES:
            raise UnsupportedProgram(
                f"the program is not a forward program: it holds {name}; give the program as it is before "
                "append_backward and optimizer.minimize"
            )
        if name.startswith(_CONTROL_FLOW):
            raise UnsupportedProgram(
                f"the program holds control flow ({name}), which a static plan cannot shard; trace the model "
                f"with branches and loops that do not depend on tensor values. {OF_VALUES[0].upper()}{OF_VALUES[1:]}"
            )
        if name.startswith("dist_op.") or (op.dist_attr is not None):
            raise UnsupportedProgram(f"the program is already distributed ({name} has placements); give the serial program")
