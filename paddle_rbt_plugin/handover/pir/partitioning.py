"""Takes an annotated program through Paddle's backward pass, optimizer, partitioner and resharder, for any rank, in this
process and without a device."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.base.framework import auto_complete_op_role
from paddle.distributed.auto_parallel.static import pir_pass
from paddle.distributed.auto_parallel.static.engine import set_all_ops_op_role
from paddle.distributed.auto_parallel.static.mix_to_dist_pass import apply_mix2dist_pass
from paddle.distributed.auto_parallel.static.pir_pass import RemovePasses, ReshardPasses
from paddle.distributed.auto_parallel.strategy import Strategy
from paddle.distributed.fleet.meta_optimizers.common import OpRole
from paddle.distributed.passes.pass_base import new_pass

from paddle_rbt_plugin.handover.pir.patches import environment_read_anew, exact_partition
from paddle_rbt_plugin.handover.pir.shared_weights import gradients_summed
from paddle_rbt_plugin.handover.pir.zero import divided


@dataclass(frozen=True)
class Partitioned:
    """A program that Paddle has completed and partitioned; its reshards are not resolved yet."""

    program: Any
    startup: Any
    gradients: list[Any]
    """Pairs of a parameter and its gradient."""


def partition(program: Any, train: bool = True, recompute: bool = False, zero_stage: int = 0) -> Partitioned:
    """Completes an annotated forward program for training with AdamW, or for evaluation, and partitions it, in place. With
    ``recompute``, backward recomputes the marked ops; ``zero_stage`` divides states."""
    with exact_partition():
        return _partition(program, train, recompute, zero_stage)


def _partition(program: Any, train: bool, recompute: bool, zero_stage: int) -> Partitioned:
    gradients: list[Any] = []
    paddle.enable_static()
    try:
        startup = paddle.static.Program()
        apply_mix2dist_pass(program)
        set_all_ops_op_role(program.global_block(), OpRole.Forward)
        if train:
            loss = [op for op in program.global_block().ops if op.num_results()][-1].result(0)
            optimizer = paddle.optimizer.AdamW(1e-3)
            with paddle.static.program_guard(program, startup), gradients_summed(optimizer), divided(optimizer, zero_stage):
                with auto_complete_op_role(program, OpRole.Backward):
                    gradients = paddle.autograd.ir_backward.append_backward(loss)
                with auto_complete_op_role(program, OpRole.Optimize):
                    optimizer._apply_optimize(loss, startup, params_grads=gradients)
            apply_mix2dist_pass(program)
            if recompute:
                new_pass("auto_parallel_recompute_pir", Strategy().recompute.to_dict()).apply([program], [startup])
        pir_pass.apply_partition_pass(program)
    finally:
        paddle.disable_static()
    return Partitioned(program, startup, gradients)


def resolve(partitioned: Partitioned) -> Any:
    """The program of this process's rank: reshards are resolved and the ops of other ranks removed, in place."""
    log = logging.getLogger(ReshardPasses.__module__)  # it spells out every reshard between stages
    level = log.level
    log.setLevel(logging.WARNING)
    paddle.enable_static()
    try:
        with exact_partition():
            ReshardPasses.apply_reshard_pass(partitioned.program, partitioned.gradients)
        RemovePasses.apply_all(partitioned.program, partitioned.startup, partitioned.gradients)
    finally:
        paddle.disable_static()
        log.setLevel(level)
    return partitioned.program


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """Makes Paddle take this process for that rank, so that it makes the program of the rank."""
    before = os.environ.get("PADDLE_TRAINER_ID")
    os.environ["PADDLE_TRAINER_ID"] = str(rank)
    try:
        with environment_read_anew.apply():
            yield
    finally:
        if before is None:
            del os.environ["PADDLE_TRAINER_ID"]
        else:
            os.environ["PADDLE_TRAINER_ID"] = before
