"""What one rank holds and does: read from a partitioned program, and compared with another such structure.

A structure has the collectives and transfers (phase, kind, axis, bytes), the local bytes of parameters, gradients and optimizer
states, and the FLOP of the local matrix products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from paddle.distributed.auto_parallel.static.process_group import get_process_group

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.forms import LOSS_REDUCTIONS
from paddle_rbt_plugin.cost.compute import CONVOLUTIONS
from paddle_rbt_plugin.graph import DTYPE_BYTES
from paddle_rbt_plugin.graph.pir import dtype_name

PHASES = {0: "forward", 1: "backward", 2: "optimizer"}
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
PRODUCTS = frozenset({"matmul", "bmm"})
"""The matrix products whose FLOP are compared, besides convolutions; other products, which few programs have, are not."""
_TRANSFERS = {"send_v2": "send", "p_send": "send", "recv_v2": "receive", "p_recv": "receive"}
FIGURES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "matmul_flop")
"""The single numbers of a structure."""
Collectives = Mapping[tuple[str, str, str, int], int]
"""How often each (phase, kind, axis, bytes of the message) occurs; the axis of a transfer between stages is ``pp``."""


@dataclass(frozen=True)
class Structure:
    """What one rank holds and does in a step of one micro batch."""

    collectives: Collectives
    parameter_bytes: int
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    matmul_flop: float = 0.0
    local_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of every parameter, by name."""


def compare(expected: Structure, found: Structure) -> list[str]:
    """The differences, in sentences; empty if the prediction matches the program."""
    lines = []
    for key in sorted(set(expected.collectives) | set(found.collectives)):
        predicted_count, count = expected.collectives.get(key, 0), found.collectives.get(key, 0)
        if predicted_count != count:
            phase, kind, axis, nbytes = key
            lines.append(f"{phase} {kind} along {axis} of {nbytes} bytes: predicted {predicted_count}, in the program {count}")
    for name in FIGURES:
        a, b = getattr(expected, name), getattr(found, name)
        if a != b:
            lines.append(f"{name.replace('_', ' ')}: predicted {a:,.0f}, in the program {b:,.0f}")
    for name in sorted(set(expected.local_shapes) | set(found.local_shapes)):
        shape, real = expected.local_shapes.get(name), found.local_shapes.get(name)
        if shape != real:
            lines.append(f"parameter {name}: predicted local shape {shape}, in the program {real}")
    return lines


def structure_of(program: Any, gradients: Sequence[Any], parameters: Sequence[Any], mesh: ProcessMesh) -> Structure:
    """The structure of the program of a rank of ``mesh``, without optimizer states; ``parameters`` are the ops of the
    parameters to count, ``gradients`` the pairs of a parameter and its gradient."""
    ops = program.global_block().ops
    return Structure(
        collectives=_collectives(ops, mesh),
        parameter_bytes=sum(local_bytes(op.result(0)) for op in parameters),
        gradient_bytes=sum(local_bytes(gradient) for _, gradient in gradients if gradient is not None),
        matmul_flop=_matmul_flop(ops),
        local_shapes={op.attrs()["parameter_name"]: _local_shape(op.result(0)) for op in parameters},
    )


def parameters_of(program: Any, names: Collection[str]) -> list[Any]:
    """The ops of the parameters with the given names."""
    return [op for op in parameter_ops(program) if op.attrs()["parameter_name"] in names]


def parameter_ops(program: Any) -> list[Any]:
    return [op for op in program.global_block().ops if op.name() == "builtin.parameter"]


def _collectives(ops: Sequence[Any], mesh: ProcessMesh) -> Collectives:
    axis_of = {tuple(sorted(group)): axis for axis in mesh.axes for group in mesh.groups(axis)}
    count: Counter[tuple[str, str, str, int]] = Counter()

    def add(op: Any, kind: str, message: Any, times: int = 1) -> None:
        ranks = tuple(sorted(get_process_group(op.int_attr("ring_id")).ranks))
        if len(ranks) > 1:  # alone, a rank moves nothing
            count[(PHASES[op.op_role], kind, axis_of.get(ranks, "pp"), local_bytes(message))] += times

    for op in ops:
        kind = op.name().removeprefix("pd_op.").removesuffix("_")
        if kind in _TRANSFERS:
            message = op.operand_source(0) if _TRANSFERS[kind] == "send" else op.result(0)
            count[(PHASES[op.op_role], _TRANSFERS[kind], "pp", local_bytes(message))] += 1
        elif kind == "c_softmax_with_cross_entropy":  # they are inside its kernel
            add(op, "all_reduce", op.result(1), LOSS_REDUCTIONS)
        elif kind in _COLLECTIVES:
            add(op, kind, op.result(0) if kind == "all_gather" else op.operand_source(0))
    return count


def _matmul_flop(ops: Sequence[Any]) -> float:
    """A product of m x k by k x n takes 2 m n k FLOP; for a convolution, k is the size of a filter. A gradient takes two such
    products, or one if the other is not needed."""
    total = 0.0
    for op in ops:
        type_ = op.name().removeprefix("pd_op.")
        backward = type_.endswith("_grad")
        type_ = type_.removesuffix("_grad")
        if type_ in PRODUCTS:
            x = _local_shape(op.operand_source(0))
            inner = x[-2] if len(x) > 1 and op.attrs().get("transpose_x") else x[-1]
        elif type_ in CONVOLUTIONS:
            inner = prod(_local_shape(op.operand_source(1))[1:])
        else:
            continue
        out = _local_shape(op.operand_source(2) if backward else op.result(0))
        wanted = sum(r.initialized() for r in op.results()) if backward else 1
        total += 2.0 * wanted * prod(out) * inner
    return total


def _local_shape(value: Any) -> tuple[int, ...]:
    return tuple(value._local_shape if value.is_dist() else value.shape)


def local_bytes(value: Any) -> int:
    return prod(_local_shape(value)) * DTYPE_BYTES[dtype_name(value.dtype)]
