"""Gives the random ops of a PIR program their streams, while the program is built on distributed inputs.

An op with a seed operand reads it from an op ``seed`` of its own, which draws from a generator named after the op and the shard
of its result that this rank holds (see ``random_streams``); where the program fixes the seed, from a constant. A recomputed op
reads the same seed again, and so draws what it drew. An op with a stream attribute gets that name there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import paddle

from paddle_rbt_plugin.completion.distributed_ops import call_op, placement_of, producer_of, set_placement
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.graph.pir import plain_attrs
from paddle_rbt_plugin.graph.random_ops import DEVICE_OPS, SEED_OP, SEED_OPERANDS, STREAM_ATTRIBUTES, canonical, draws_whole
from paddle_rbt_plugin.handover.pir.rewrite import Inputs, SerialOp, build_op, rank_on
from paddle_rbt_plugin.handover.shared.conversion import paddle_mesh
from paddle_rbt_plugin.handover.shared.random_streams import PREFIX, coordinates, hashed, register, stream_name

_SEED = f"pd_op.{SEED_OP}"


class Seeds:
    """The streams of one program; its random ops are numbered in the order in which they are built, alike on all ranks."""

    def __init__(self) -> None:
        self._count = 0

    def build(self, serial: SerialOp, inputs: Inputs) -> list[Any]:
        """Builds an op that draws random numbers, with the arguments and the result of ``build_op``."""
        name, attrs, mesh = serial.name, serial.attrs, serial.mesh
        target = paddle_mesh(mesh)
        slot = SEED_OPERANDS.get(canonical(name))
        seed_op = None if slot is None or inputs.get(slot) else new_seed_op(target)
        built = build_op(serial, inputs)
        op = built[-1]
        shard = coordinates(placement_of(op.result(0)), mesh, rank_on(mesh))
        stream = stream_name(self._count, shard)
        self._count += 1
        if draws_whole(name, attrs):
            return self._of_whole(built, name, attrs, inputs, target) if shard else built
        if slot is None:
            op.set_str_attr(STREAM_ATTRIBUTES[canonical(name)], stream)
        if seed_op is None:
            return built
        if attrs.get("fix_seed"):
            seed_op.set_int_attr("seed", hashed(attrs["seed"], shard))
            seed_op.set_bool_attr("deterministic", False)
        else:
            seed_op.set_str_attr("rng_name", stream)
        _set_operand(op, op.get_input_names().index(slot), seed_op.result(0))
        return [seed_op, *built]

    @staticmethod
    def _of_whole(built: Sequence[Any], name: str, attrs: Mapping[str, Any], inputs: Inputs, target: Any) -> list[Any]:
        """The op built again on replicated operands: all ranks draw from generators in one state, so shards would be alike."""
        for op in reversed(built):
            op.erase()
        everywhere = [paddle.distributed.Replicate()] * len(target.shape)
        whole = {slot: [paddle._C_ops.reshard(v, target, everywhere) for v in values] for slot, values in inputs.items()}
        op = producer_of(call_op(name, attrs.items(), whole)[0])
        return [*(v.get_defining_op() for values in whole.values() for v in values), op]


def _set_operand(op: Any, position: int, value: Any) -> None:
    """Gives a built op an operand that it lacks. Paddle's rule for dropout, which infers placements, refuses a seed."""
    pir = paddle.base.libpaddle.pir
    op.operand(position).set_source(value)
    attr = op.dist_attr
    operands = [value.dist_attr() if i == position else attr.operand(i) for i in range(attr.num_operands())]
    results = [attr.result(i) for i in range(attr.num_results())]
    op.dist_attr = pir.create_op_dist_attribute(attr.process_mesh, operands, results)


def stream_names(program: Any) -> tuple[str, ...]:
    """The streams that the ops of a program read."""
    names: dict[str, None] = {}
    for op in program.global_block().ops:
        type_ = op.name().removeprefix("pd_op.")
        attribute = "rng_name" if op.name() == _SEED else STREAM_ATTRIBUTES.get(type_)
        if attribute is not None and op.attrs().get(attribute, "").startswith(PREFIX):
            names[op.attrs()[attribute]] = None
    return tuple(names)


def draws_from_device(program: Any) -> bool:
    """Whether any op of a program draws from the generator of the device."""
    ops = ((op.name().removeprefix("pd_op."), op) for op in program.global_block().ops)
    return any(canonical(type_) in DEVICE_OPS and draws_whole(type_, plain_attrs(op)) for type_, op in ops)


def register_streams(program: Any, seed: int) -> None:
    """Makes the generators that a program reads, for whoever runs it without an engine."""
    register(stream_names(program), seed)


def new_seed_op(target: Any) -> Any:
    """An op ``seed`` in the current program, where ops are inserted now. Paddle has no function that builds one in PIR: it is
    translated from the legacy IR."""
    pir = paddle.base.libpaddle.pir
    with paddle.pir_utils.OldIrGuard():
        program = paddle.base.framework.Program()
        with paddle.base.framework.program_guard(program):
            block = program.global_block()
            out = block.create_var(name="seed", dtype="int32", shape=[1])
            attrs = {"seed": 0, "deterministic": True, "rng_name": "", "force_cpu": True}
            block.append_op(type=SEED_OP, outputs={"Out": [out]}, attrs=attrs)
        translated = pir.translate_to_pir(program.desc)
    (prototype,) = (op for op in translated.global_block().ops if op.name() == _SEED)
    op = prototype.clone(pir.IrMapping(), pir.CloneOptions(False, True, True))
    set_placement(op.result(0), target, Placement.replicated(1))
    op.result(0).stop_gradient = True
    return op
