"""The updates of optimizers that Paddle knows no sharding of, made on the shards that a rank holds.

Paddle has rules for the ops of SGD, Adam and AdamW. For those of others it gathers parameter, gradient and states, updates all
of them on every rank, and keeps a part. Where an update treats every element by itself, the op runs on shards as it stands:
its tensors lie as the states do, or, where there are none, as the parameter does.
"""

from __future__ import annotations

from typing import Any

import paddle

ELEMENTWISE_UPDATES = frozenset(
    {"adadelta_", "adagrad_", "adamax_", "asgd_", "momentum_", "nadam_", "radam_", "rmsprop_", "rprop_"}
)
"""Ops whose new parameter and states depend, element by element, on those of the old ones, and on numbers."""


def shard_updates(program: Any) -> None:
    """Lets the updates of a program that is still to be partitioned run on shards."""
    for op in program.global_block().ops:
        if op.name().removeprefix("pd_op.") in ELEMENTWISE_UPDATES and op.dist_attr is not None:
            _run_on_shards(op)


def _run_on_shards(op: Any) -> None:
    pir = paddle.base.libpaddle.pir
    slots = dict(zip(op.get_input_names(), op.operands_source(), strict=True))
    parameter, attr = slots["param"], op.dist_attr
    like = [v for v in op.operands_source() if v.initialized() and v.shape == parameter.shape]
    states = [v for v in like if v.id not in (parameter.id, slots["grad"].id)]
    target = (states or [parameter])[0].dist_attr()
    operands = [
        target if v.initialized() and v.shape == parameter.shape else attr.operand(i)
        for i, v in enumerate(op.operands_source())
    ]
    results = []
    for i, value in enumerate(op.results()):
        alike = value.initialized() and value.shape == parameter.shape
        results.append(target if alike else attr.result(i))
        if alike:
            value.set_type(pir.cvt_to_dist_type(value.type(), target))
    op.dist_attr = pir.create_op_dist_attribute(attr.process_mesh, operands, results, attr.chunk_id)
