"""From an annotated serial program to the program of each rank, through the chain of Paddle's Planner and Parallelizer."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.base.backward import append_backward
from paddle.distributed.auto_parallel.static.completion import Completer
from paddle.distributed.auto_parallel.static.dist_context import DistributedContext
from paddle.distributed.auto_parallel.static.partitioner import Partitioner
from paddle.distributed.auto_parallel.static.reshard import Resharder
from paddle.utils import unique_name

from paddle_rbt_plugin.graph.legacy import LegacyGraph
from paddle_rbt_plugin.handover.legacy.annotate import annotate, check_completed
from paddle_rbt_plugin.handover.legacy.ops import legacy_static_ops
from paddle_rbt_plugin.plan.plan import Plan


@dataclass(frozen=True)
class RankProgram:
    """What one rank runs."""

    main: Any
    startup: Any


class LegacyParallelizer:
    """Completes a serial forward program once, with its backward pass, and partitions it for any rank in any process."""

    def __init__(self, main: Any, startup: Any, loss: Any, optimizer: Any, legacy: LegacyGraph, plan: Plan):
        annotate(main, legacy, plan)
        self.context = DistributedContext(main, startup, optimizer, loss)
        self.completer = Completer(self.context)
        self.completer.complete_forward_annotation()
        check_completed(self.context, legacy, plan)
        self.context.block_state.parse_forward_blocks(self.context.serial_main_program)
        self.parameters_and_gradients = self._backward()

    def _backward(self) -> list[tuple[Any, Any]]:
        context = self.context
        with paddle.static.program_guard(context.serial_main_program, context.serial_startup_program):
            pairs = append_backward(context.serial_loss, distop_context=context.dist_op_context)
        self.completer.complete_backward_annotation(context.serial_main_program)
        context.block_state.parse_backward_blocks(context.serial_main_program)
        return pairs

    def rank(self, rank: int) -> RankProgram:
        """The program of a rank: partitioned, with its optimizer, resharded."""
        context = self.context
        main, startup, pairs = Partitioner(context, rank).partition(
            context.serial_main_program, context.serial_startup_program, self.parameters_and_gradients
        )
        optimizer = copy.deepcopy(context.serial_optimizer)  # it makes the accumulators of a parameter only once
        building = paddle.static.program_guard(main, startup)
        with building, unique_name.guard("opt_"), legacy_static_ops():
            optimizer.apply_gradients(pairs)
        self.completer.complete_update_annotation(main)
        Resharder(main, startup, rank, context, pairs).reshard()
        return RankProgram(main, startup)
