"""The updates of optimizers that Paddle knows no sharding of, made on the shards that a rank holds.

Paddle has rules for the ops of SGD, Adam and AdamW. For those of others it gathers parameter, gradient and states, updates all
of them on every rank, and keeps a part. Where an update treats every element by itself, the op runs on shards as it stands:
its tensors lie as the parameter does, or as the states where ZeRO divides those further.
"""

from __future__ import annotations

from typing import Any

import paddle

from paddle_rbt_plugin.completion import Placement
from paddle_rbt_plugin.completion.distributed_ops import set_placement
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.shared.zero import ELEMENTWISE

_WITHOUT_RULE = frozenset(f"pd_op.{name.lower()}_" for name in ELEMENTWISE) - {"pd_op.adam_", "pd_op.adamw_", "pd_op.sgd_"}


_NOT_IN_PIR = {
    "ASGD": "keeps gradients of past batches in one tensor, whose placement Paddle does not know",
    "LBFGS": "evaluates the loss several times in a step",
    "RMSProp": "has an op that ends the process when Paddle builds it on distributed tensors",
}


def check_optimizer(optimizer: Any) -> None:
    """Raises TunerError for an optimizer that does not run in distributed PIR programs."""
    for name, reason in _NOT_IN_PIR.items():
        if isinstance(optimizer, getattr(paddle.optimizer, name, ())):
            others = ", ".join(n for n in ELEMENTWISE if n not in _NOT_IN_PIR)
            raise TunerError(f"{name} {reason}; train with another optimizer ({others}), or in dygraph with plan.shard_layer")


def shard_updates(program: Any) -> None:
    """Lets the updates of a program that is still to be partitioned run on shards."""
    for op in program.global_block().ops:
        if op.name() in _WITHOUT_RULE and op.dist_attr is not None:
            _run_on_shards(op)


def _run_on_shards(op: Any) -> None:
    pir = paddle.base.libpaddle.pir
    slots = dict(zip(op.get_input_names(), op.operands_source(), strict=True))
    parameter, attr = slots["param"], op.dist_attr

    def alike(value: Any) -> bool:
        return bool(value.initialized() and value.shape == parameter.shape)

    states = [v for v in op.operands_source() if alike(v) and v.id not in (parameter.id, slots["grad"].id)]
    target = max((parameter, *states), key=lambda v: sum(axis >= 0 for axis in v.dist_attr().dims_mapping)).dist_attr()
    for state in states:  # some optimizers make theirs whole
        if state.dist_attr() != target:
            set_placement(state, target.process_mesh, Placement(tuple(target.dims_mapping)))
    for value in filter(alike, op.results()):
        value.set_type(pir.cvt_to_dist_type(value.type(), target))
    operands = [target if alike(v) else attr.operand(i) for i, v in enumerate(op.operands_source())]
    results = [target if alike(v) else attr.result(i) for i, v in enumerate(op.results())]
    op.dist_attr = pir.create_op_dist_attribute(attr.process_mesh, operands, results, attr.chunk_id)
