"""Every rank of a fake cluster goes through Partitioner, optimizer and Resharder in one process."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from legacy_models import LegacyProgram, adamw, gpt, one_plan
from paddle.distributed.auto_parallel.static.process_group import get_process_group

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.graph.legacy import read_legacy_program
from paddle_rbt_plugin.handover.legacy.partition import LegacyParallelizer, RankProgram

RANKS = range(8)
PLANS = {
    "dp8": {"dp": 8},
    "mp8": {"mp": 8},
    "dp2 x mp4": {"dp": 2, "mp": 4},
    "mp2 x dp4": {"mp": 2, "dp": 4, "order": "mp_dp"},
    "dp4 x pp2": {"dp": 4, "pp": 2},
    "dp2 x mp2 x pp2": {"dp": 2, "mp": 2, "pp": 2},
}
QUICK = [(2, "mp2 x dp4"), (3, "dp2 x mp2 x pp2")]
SLOW = [(layers, plan) for layers in (2, 3, 4) for plan in PLANS if (layers, plan) not in QUICK]
SUMS = ("c_allreduce", "all_reduce", "c_allgather", "all_gather", "c_concat", "c_broadcast", "broadcast", "c_reduce")


def parallelized(program: LegacyProgram, plan: rbt.Plan) -> dict[int, RankProgram]:
    legacy = read_legacy_program(program.main, program.loss)
    chain = LegacyParallelizer(program.main, program.startup, program.loss, adamw(), legacy, plan)
    return {rank: chain.rank(rank) for rank in RANKS}


def check_local_shapes(program: LegacyProgram, plan: rbt.Plan, ranks: dict[int, RankProgram]) -> None:
    held: set[str] = set()
    for rank, local in ranks.items():
        for param in local.main.global_block().all_parameters():
            planned = plan.placements(param.name)
            if rank in planned.mesh.ranks:
                whole = tuple(program.main.global_block().vars[param.name].shape)
                assert tuple(param.shape) == planned.placement.local_shape(whole, planned.mesh), (rank, param.name)
                held.add(param.name)
    assert held == {p.name for p in program.main.all_parameters()}


def check_update(ranks: dict[int, RankProgram]) -> None:
    """Gradients and optimizer states lie as their parameters."""
    for rank, local in ranks.items():
        block = local.main.global_block()
        updates = [op for op in block.ops if "Moment1" in op.input_names]
        assert {op.input("Param")[0] for op in updates} == {p.name for p in block.all_parameters()}
        for op in updates:
            shapes = {slot: tuple(block.vars[op.input(slot)[0]].shape) for slot in ("Param", "Grad", "Moment1", "Moment2")}
            assert len(set(shapes.values())) == 1, (rank, op.input("Param"), shapes)


def check_messages(ranks: dict[int, RankProgram]) -> None:
    """Sends pair with receives in order, and the members of a group run the same collectives in the same order."""
    sent: dict[tuple, list] = defaultdict(list)
    received: dict[tuple, list] = defaultdict(list)
    collectives: dict[tuple, dict[int, list]] = defaultdict(lambda: defaultdict(list))
    for rank, local in ranks.items():
        block = local.main.global_block()
        for op in block.ops:
            if op.type == "send_v2":
                sent[rank, peer(op)].append(message(block, op.input("X")[0]))
            elif op.type == "recv_v2":
                received[peer(op), rank].append(message(block, op.output("Out")[0]))
            elif op.type.startswith(SUMS):
                group = get_process_group(op.attr("ring_id")).ranks
                collectives[tuple(group)][rank].append((op.type, message(block, op.input_arg_names[0])))
    assert sent == received
    for group, by_rank in collectives.items():
        assert set(by_rank) == set(group)
        first, *rest = by_rank.values()
        assert all(other == first for other in rest), group


def peer(op: Any) -> int:
    return get_process_group(op.attr("ring_id")).ranks[op.attr("peer")]


def message(block: Any, name: str) -> tuple:
    var = block._var_recursive(name)
    return tuple(var.shape), str(var.dtype)


@pytest.mark.parametrize(("layers", "degrees"), [*QUICK, *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW)])
def test_every_rank_gets_the_planned_shapes_and_matching_messages(layers: int, degrees: str) -> None:
    program = gpt(layers)
    plan = one_plan(program, **PLANS[degrees])
    ranks = parallelized(program, plan)
    check_local_shapes(program, plan, ranks)
    check_update(ranks)
    check_messages(ranks)
    has_pipeline = plan.degrees["pp"] > 1
    assert any(op.type == "send_v2" for op in ranks[0].main.global_block().ops) == has_pipeline


def test_a_tied_embedding_lives_with_its_optimizer_states_on_the_first_stage() -> None:
    program = gpt(2)
    ranks = parallelized(program, one_plan(program, dp=4, pp=2))
    tied = next(p.name for p in program.main.all_parameters() if tuple(p.shape) == (128, 32))
    for rank, local in ranks.items():
        updates = [op.input("Param")[0] for op in local.main.global_block().ops if "Param" in op.input_names]
        assert (tied in updates) == (rank < 4)


def test_stages_between_the_first_and_the_last_split_the_batch_too() -> None:
    program = gpt(4)
    plan = one_plan(program, dp=2, pp=4)
    legacy = read_legacy_program(program.main, program.loss)
    chain = LegacyParallelizer(program.main, program.startup, program.loss, adamw(), legacy, plan)
    block = chain.context.serial_main_program.global_block()
    products = [op.output("Out")[0] for op in block.ops if op.type == "matmul_v2"]
    placed = [chain.context.get_tensor_dist_attr_for_program(block.vars[name]).dims_mapping[0] for name in products]
    assert placed == [0] * len(products)
