"""Shapes that a program computes from tensors of known shapes, as constants.

``paddle.shape(h)`` is an op. What reads its result as a shape has a shape that Paddle does not know, although that of ``h`` is
known; and on a rank that holds a part of ``h``, the op gives the shape of the part. So everything that is computed from known
shapes becomes a constant, and ops whose results had no known shape are built again on these constants.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from paddle_rbt_plugin.completion.distributed_ops import building_pir, call_op, op_call, producer_of, without_call_stacks
from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.graph.pir import CONSTANT_OPS, argument_kinds, constant_value, dtype_name, plain_attrs
from paddle_rbt_plugin.handover.pir.replay import erase, mark_like, operands_by_slot, results_of

_SHAPES = ("pd_op.shape", "pd_op.shape64")
_INTEGERS = ("int32", "int64")


def with_static_shapes(program: Any, loss: Any = None) -> tuple[Any, Any]:
    """A program and its loss with known shapes as constants: copies if anything changes, since the values of the program are
    the caller's."""
    if not _computes_shapes(program):
        return program, loss
    values = paddle.pir.IrMapping()
    copy = program.clone(values)
    make_shapes_static(copy)
    return copy, None if loss is None else values.look_up(loss)


def make_shapes_static(program: Any) -> None:
    """Turns known shapes into constants, in place. Shapes that depend on values stay unknown."""
    if not _computes_shapes(program):
        return
    known: set[int] = set()
    ops = [op for op in program.global_block().ops if not op.name().startswith("builtin.")]
    replaced = []
    with building_pir(), paddle.static.program_guard(program), without_call_stacks():
        for op in ops:
            paddle.base.libpaddle.pir.set_insertion_point(op)
            numbers = _numbers(op, known)
            if numbers is not None:
                constant = _constant(numbers)
                known.add(constant.id)
                op.result(0).replace_all_uses_with(constant)
                replaced.append(op)
            elif any(n < 0 for value in results_of(op) if value.initialized() for n in value.shape) and _build_again(op):
                replaced.append(op)
        for op in reversed(replaced):
            erase(op)


def _computes_shapes(program: Any) -> bool:
    return any(op.name() in _SHAPES for op in program.global_block().ops)


def _numbers(op: Any, known: set[int]) -> np.ndarray | None:
    """What an op computes from known shapes alone: whole numbers, in a list or one alone; else None. ``known`` are the ids of
    constants that stand for shapes."""
    if op.name() in _SHAPES:
        shape = op.operand_source(0).shape
        return np.array(shape, dtype_name(op.result(0).dtype)) if min(shape, default=0) >= 0 else None
    inputs = operands_by_slot(op)
    values = [value for some in inputs.values() for value in some]
    if known.isdisjoint(value.id for value in values) or any(v.get_defining_op().name() not in CONSTANT_OPS for v in values):
        return None
    result, *others = op.results()
    if others or dtype_name(result.dtype) not in _INTEGERS or len(result.shape) > 1:
        return None
    kinds = argument_kinds(op.name())
    paddle.disable_static()
    try:
        read = {slot: constant_value if kinds.get(slot) == "constant" else _tensor for slot in inputs}
        given = {slot: [read[slot](v.get_defining_op()) for v in some] for slot, some in inputs.items()}
        return np.array(op_call(op.name().split(".", 1)[1], plain_attrs(op).items(), given)())
    finally:
        paddle.enable_static()


def _tensor(constant: Any) -> Any:
    attrs = plain_attrs(constant)
    tensor = paddle.to_tensor(constant_value(constant), attrs["dtype"])
    return tensor.expand(list(attrs["shape"])) if "shape" in attrs else tensor


def _constant(numbers: np.ndarray) -> Any:
    if numbers.ndim:
        attrs = {"value": tuple(numbers.tolist()), "dtype": str(numbers.dtype)}
        return call_op("full_int_array", attrs.items(), {})[0]
    return call_op("full", {"shape": (), "value": float(numbers), "dtype": str(numbers.dtype)}.items(), {})[0]


def _build_again(op: Any) -> bool:
    """Builds an op on the shapes that its operands have now; False for one that cannot be built, which stays."""
    try:
        results = call_op(op.name().split(".", 1)[1], plain_attrs(op).items(), operands_by_slot(op))
    except UnsupportedProgram:
        return False
    mark_like(op, [producer_of(results[0])], results)
    for old, new in zip(results_of(op), results, strict=True):
        old.replace_all_uses_with(new)
    return True
