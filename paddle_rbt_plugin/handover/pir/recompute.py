"""Marks in a serial PIR program what a plan recomputes.

Paddle's pass ``auto_parallel_recompute_pir``, which ``strategy.recompute`` switches on, runs the ops again in backward that
carry one number as ``fwd_recompute_id``, from the first to the last of them; ``recompute`` calls in a model set it. A plan
recomputes a layer or its attention core instead, so their ops get the numbers here, before the program is annotated.

Ops that draw random numbers do not stand in the way: what reads a seed draws the same from it again, and the results of others
are kept (see ``patches.let_recomputed_ops_draw_the_same``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from paddle_rbt_plugin.completion import Kernel, Placement, SegmentWork, Value
from paddle_rbt_plugin.cost.attention import forward_cores
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.graph import Graph, read_program
from paddle_rbt_plugin.graph.pir import RECOMPUTE_MARKS
from paddle_rbt_plugin.handover.shared.recompute import recomputes, strategy_of
from paddle_rbt_plugin.layers import cluster_layers
from paddle_rbt_plugin.layers.layers import Segment
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.request import Constraint

_MARK = RECOMPUTE_MARKS[0]
_REPEATABLE = ("pd_op.assign_value_",)
"""Ops that change their operands to what they are after the first time: a constant of the program."""


def mark(program: Any, graph: Graph, plan: Plan) -> None:
    """Marks what ``plan`` recomputes in ``program``, from which ``graph`` was read; regions that the model marks stay as they
    are."""
    if recomputes(plan) and not is_marked(program):
        ops = program.global_block().ops
        for number, region in enumerate(_regions(graph, plan), start=1):
            for i in region:
                ops[graph.ops[i].source].set_int_attr(_MARK, number)


def is_marked(program: Any) -> bool:
    """Whether anything in a program is marked for recomputation."""
    return any(op.has_attr(_MARK) for op in program.global_block().ops)


def constraints(strategy: Any, program: Any) -> list[Constraint]:
    """What a strategy and a serial program leave of the ways to recompute; empty where all are open.

    Raises TunerError for a strategy that asks for the recomputation of ops that cannot be run twice, which the model does not
    mark itself."""
    asked = bool(strategy.recompute.enable)
    if is_marked(program):
        return [Constraint("the regions that the model marks", {"recompute": ("full",) if asked else ("none", "full")})]
    obstacle = _obstacle(program)
    if obstacle is None:
        return [Constraint("strategy.recompute", {"recompute": ("selective", "full")})] if asked else []
    if asked:
        raise TunerError(
            f"strategy.recompute is enabled, but {obstacle}; train without recomputation or without such ops, or wrap what can "
            "be recomputed in paddle.distributed.fleet.utils.recompute"
        )
    return [Constraint(f"executing a program in which {obstacle}", {"recompute": ("none",)})]


def is_allowed(plan: Plan, limits: Iterable[Constraint]) -> bool:
    """Whether every constraint allows what the plan recomputes; those of a loaded plan are only warned about."""
    ways = {strategy_of(plan, entry) for entry in range(len(plan.stages))}
    return all(ways <= {*limit.values["recompute"], "none"} for limit in limits if "recompute" in limit.values)


@contextmanager
def switched_on(strategy: Any, program: Any, plan: Plan) -> Iterator[None]:
    """Lets Paddle recompute what is marked in ``program``, where strategy or plan ask for it; the strategy is the user's, and
    as it was afterwards."""
    asked = strategy.recompute.enable
    strategy.recompute.enable = is_marked(program) and bool(asked or recomputes(plan))
    try:
        yield
    finally:
        strategy.recompute.enable = asked


def _obstacle(program: Any) -> str | None:
    """Why the layers of a program cannot be run twice, if they cannot."""
    graph, ops = read_program(program, needs_loss=False), program.global_block().ops
    for op in (graph.ops[i] for block in cluster_layers(graph).blocks for i in block.ops):
        name = ops[op.source].name()
        if name.endswith("_") and name not in _REPEATABLE:
            return f"{op.name} in the layers modifies its operands, and recomputation would do so twice"
    return None


def _regions(graph: Graph, plan: Plan) -> Iterator[frozenset[int]]:
    """Positions of the ops that are recomputed together."""
    layers = cluster_layers(graph)
    entries = plan.stage_of_layers(layers.count)
    for block in layers.blocks:
        strategy = strategy_of(plan, entries[block.layer])
        if strategy == "full":
            yield frozenset(block.ops)
        elif strategy == "selective":
            yield from _cores(graph, block)


def _cores(graph: Graph, block: Segment) -> Iterator[frozenset[int]]:
    """The attention cores of a block, found as the cost model finds them in what one device runs."""

    def values(tensors: tuple[int, ...]) -> tuple[Value, ...]:
        found = (graph.tensors[t] for t in tensors)
        return tuple(Value(t.name, t.shape, t.dtype, Placement.replicated(t.ndim), kind=t.kind) for t in found)

    ops = [graph.ops[i] for i in block.ops]
    kernels = tuple(Kernel(op.type, "forward", values(op.operands), values(op.results)) for op in ops)
    for core in forward_cores(SegmentWork(kernels, (), (), (), (), (), (), (), ())):
        yield frozenset(block.ops[i] for i in core.ops)
