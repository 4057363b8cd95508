"""PIR ops and values with placements: building ops on distributed values, reading and setting their placements.

The oracle asks with these functions, and hand-over builds with them, so both do the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.graph.cpp_signatures import Argument, signature
from paddle_rbt_plugin.graph.pir import CONTAINER_OPS


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
def without_call_stacks() -> Iterator[None]:
    """Ops built inside do not record where in Python they were built, which takes Paddle longer than building them. Paddle
    calls ``traceback.extract_stack``, which heeds this limit."""
    limit = getattr(sys, "tracebacklimit", None)
    sys.tracebacklimit = 0
    try:
        yield
    finally:
        if limit is None:
            del sys.tracebacklimit
        else:
            sys.tracebacklimit = limit


def call_op(name: str, attrs: Iterable[tuple[str, Any]], inputs: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Builds an op in the current program from its inputs by slot and its plain attributes; returns all of its results.

    Raises UnsupportedProgram for an op that the installed Paddle does not list."""
    built = op_call(name, attrs, inputs)()
    first = next(v for v in (built if isinstance(built, (list, tuple)) else [built]) if v is not None)
    return [v for r in producer_of(first).results() for v in result_tensors(r)]


def op_call(name: str, attrs: Iterable[tuple[str, Any]], inputs: Mapping[str, Sequence[Any]]) -> Callable[[], Any]:
    """The call that builds an op of PIR, or that computes it where its inputs are tensors of dygraph.

    Raises UnsupportedProgram for an op that the installed Paddle does not list."""
    from paddle.base import core

    function, arguments = _function(name)
    values = dict(attrs)
    if name in _AS_IN_PYTHON and _follows_python():
        if values["flatten"]:
            values, inputs = {**values, "axis": None}, {slot: of for slot, of in inputs.items() if slot != "axis"}
        by_name = {argument.name: argument for argument in arguments}
        arguments = tuple(by_name[argument] for argument in _AS_IN_PYTHON[name])
    args: list[Any] = []
    for argument in arguments:
        given = inputs.get(argument.name)
        if given is not None and argument.kind == "tensor":
            # An absent list must be None: the gradient op of one that is empty reads its first element.
            args.append(None if not given else list(given) if "vector" in argument.type else given[0])
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
    return partial(function, *args)


_AS_IN_PYTHON = dict.fromkeys(("argmax", "argmin"), ("x", "axis", "keepdims", "dtype"))
"""Ops whose functions take the arguments of the Python API from Paddle 3.3 on; another type of argument ends the process."""


@cache
def _follows_python() -> bool:
    return find_spec("paddle.base.dygraph.generated_tensor_methods_patch") is not None


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
    results = [v for r in op.results() for v in result_tensors(r)]
    return [attr_placement(a, len(value.shape)) for a, value in zip(result_attrs(op), results, strict=False)]


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

    partial = {axis: reduce_type(reduction) for axis, reduction in placement.partial}
    return paddle.base.libpaddle.pir.create_tensor_dist_attribute(mesh, list(placement.dims_mapping), partial)


def reduce_type(reduction: str) -> Any:
    """Paddle's name for a reduction of a ``Placement``."""
    from paddle.distributed import ReduceType

    return getattr(ReduceType, f"kRed{reduction.capitalize()}")


def placement_of(value: Any) -> Placement:
    """Placement of a PIR value; a value without a distributed type lies whole on every rank."""
    return attr_placement(value.dist_attr(), len(value.shape)) if value.is_dist() else Placement.replicated(len(value.shape))


def attr_placement(attr: Any, ndim: int) -> Placement:
    if attr is None:
        return Placement.replicated(ndim)
    status = attr.partial_status
    partial = sorted((axis, kind.name.removeprefix("kRed").lower()) for axis, kind in status.items()) if status else ()
    return Placement(tuple(attr.dims_mapping), tuple(partial))


def result_attrs(op: Any) -> list[Any]:
    """The distributed attributes of what a built op makes, one per tensor."""
    attr = op.dist_attr
    return [a for i in range(op.num_results()) for a in (tensor_attrs(attr.result(i)) if attr is not None else ())]


def tensor_attrs(attr: Any) -> list[Any]:
    """The distributed attributes of an operand or a result, one per tensor it holds; empty for an absent one."""
    array = attr.as_array_attr() if attr else None
    if array is not None:
        return [array[i].as_tensor_dist_attr() for i in range(len(array))]
    tensor = attr.as_tensor_dist_attr() if attr else None
    return [] if tensor is None else [tensor]


def slots_of_results(op: Any) -> tuple[str, ...]:
    """The slot of each tensor that a built op makes."""
    return tuple(slot for slot, r in zip(op.get_output_names(), op.results(), strict=True) for _ in result_tensors(r))


def result_tensors(result: Any) -> list[Any]:
    """The tensors of a result: those of the container that splits it, where it is a list."""
    if result.initialized() and result.is_combine():
        users = result.all_used_ops()
        return list(users[0].results()) if users else []
    return [result]


def _dtype(name: str) -> Any:
    import paddle
    from paddle.base import core

    return core.DataType.UNDEFINED if name == "undefined" else getattr(paddle, name)
