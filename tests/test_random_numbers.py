"""Ranks that hold one tensor draw alike, ranks that hold shards of one do not, and copies of a model start alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from launching import launch_all

from paddle_rbt_plugin.cluster import ProcessMesh
from paddle_rbt_plugin.completion import Placement
from paddle_rbt_plugin.completion.distributed_ops import placement_of
from paddle_rbt_plugin.completion.oracle import Oracle
from paddle_rbt_plugin.completion.question import Operand, Question
from paddle_rbt_plugin.graph.random_ops import DEVICE_OPS, RANDOM_OPS, SEED_OPERANDS, STREAM_ATTRIBUTES, draws
from paddle_rbt_plugin.handover.pir.partitioning import as_rank
from paddle_rbt_plugin.handover.pir.replay import annotate
from paddle_rbt_plugin.handover.shared.random_streams import Source, Streams, coordinates, hashed, seeded

MODES = ("static", "dygraph")
ELEMENTWISE = ("dropout", "another dropout", "alpha_dropout", "bernoulli", "poisson", "uniform", "gaussian", "randint", "rrelu")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks drew, and trained to."""
    return launch_all("random_numbers.py", 2, tmp_path_factory.mktemp("random") / "result", timeout=600, fresh=True)


def draw(ranks: list[dict[str, Any]], mode: str, placement: str, step: int, op: str) -> list[np.ndarray]:
    return [np.array(rank[mode][placement][step][op]) for rank in ranks]


def halves(values: list[np.ndarray], placement: str) -> list[np.ndarray]:
    """The part of each rank, where an op that draws whole tensors left them whole."""
    shape = (4, 16) if placement == "rows" else (8, 8)
    axis = 0 if placement == "rows" else 1
    return [v if v.shape == shape else np.split(v, 2, axis=axis)[rank] for rank, v in enumerate(values)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_replicas_draw_alike(ranks: list, mode: str) -> None:
    for step in (0, 1):
        for op in ranks[0][mode]["replicated"][step]:
            first, second = draw(ranks, mode, "replicated", step, op)
            np.testing.assert_array_equal(first, second, err_msg=f"{op}, step {step}")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("placement", ["rows", "columns"])
def test_shards_draw_different_numbers(ranks: list, mode: str, placement: str) -> None:
    for op in ELEMENTWISE:
        first, second = halves(draw(ranks, mode, placement, 0, op), placement)
        assert first.shape == second.shape
        assert np.mean(first != second) > 0.2, op


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("placement", ["rows", "columns", "replicated"])
def test_steps_and_ops_draw_different_numbers(ranks: list, mode: str, placement: str) -> None:
    for rank in ranks:
        first, second = rank[mode][placement]
        for op in first:
            assert first[op] != second[op], op
        assert first["dropout"] != first["another dropout"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("placement", ["rows", "columns", "replicated"])
def test_half_of_the_values_are_dropped_whatever_the_placement(ranks: list, mode: str, placement: str) -> None:
    dropped = [np.array(step[op]) == 0 for r in ranks for step in r[mode][placement] for op in ("dropout", "another dropout")]
    assert 0.35 < np.mean(np.concatenate([d.ravel() for d in dropped])) < 0.65


@pytest.mark.slow
def test_one_seed_gives_one_training_and_another_seed_another(ranks: list) -> None:
    for rank in ranks:
        assert rank["mp"]["losses"] == rank["mp again"]["losses"]
        assert rank["mp"]["losses"] != rank["mp other"]["losses"]
        assert rank["dygraph mp"]["losses"] == rank["dygraph mp again"]["losses"]
        assert rank["mp"]["streams"] == 6  # two in each of three layers


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["mp", "dp"])
def test_recomputation_draws_the_masks_of_the_forward_pass(ranks: list, axis: str) -> None:
    assert ranks[0]["dygraph mp full"]["losses"] == ranks[0]["dygraph mp"]["losses"]
    for rank in ranks:
        again = rank[f"{axis} full"]
        assert "dropout" in again["recomputed"]
        assert {"seed", "gaussian"}.isdisjoint(again["recomputed"])
        np.testing.assert_allclose(again["losses"], rank[axis]["losses"], rtol=1e-6)
        for name, total in rank[axis]["weights"].items():
            np.testing.assert_allclose(again["weights"][name], total, rtol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["mp", "dp", "unseeded", "seeded apart", "dygraph mp", "dygraph unseeded"])
def test_copies_are_equal_after_training_whatever_was_seeded(ranks: list, run: str) -> None:
    replicated = [name for name in ranks[0][run]["replicated"] if name in ranks[0][run]["weights"]]
    assert replicated
    for name in replicated:
        first, second = (rank[run]["weights"][name] for rank in ranks)
        np.testing.assert_allclose(first, second, rtol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["mp", "dp", "unseeded", "dygraph mp"])
def test_a_check_names_the_replica_that_differs_and_its_ranks(ranks: list, run: str) -> None:
    for rank in ranks:
        assert rank[run]["checked"] == ""
        assert rank[run]["changed"].startswith(
            "blocks.1.norm.bias should be equal on ranks 0, 1, but differs between rank 0 and rank 1"
        )


def annotated(build: Callable[[Any], Any], placement: Placement, rank: int) -> Any:
    """A program on a mesh of two ranks, as one of them builds it."""
    paddle.enable_static()
    try:
        program = paddle.static.Program()
        with paddle.static.program_guard(program):
            build(paddle.static.data("x", [8, 16], "float32"))
        with as_rank(rank):
            annotate(program, ProcessMesh(("mp",), (2,), (0, 1)), {"x": placement})
        return program
    finally:
        paddle.disable_static()


@pytest.mark.parametrize(("placement", "masks"), [(Placement((-1, 0)), 2), (Placement((-1, -1)), 1)], ids=["shards", "copies"])
def test_a_fixed_seed_gives_every_shard_a_mask_of_its_own_and_all_copies_one(placement: Placement, masks: int) -> None:
    def build(x: Any) -> Any:
        return paddle._C_ops.dropout(x, None, 0.5, False, "upscale_in_train", 7, True)

    programs = [annotated(build, placement, rank) for rank in (0, 1)]
    seeds = [op.attrs() for program in programs for op in program.global_block().ops if op.name() == "pd_op.seed"]
    assert len(seeds) == 2
    assert len({seed["seed"] for seed in seeds}) == masks
    assert not any(seed["deterministic"] for seed in seeds)


def test_an_op_that_draws_from_the_generator_of_the_device_gets_whole_operands() -> None:
    program = annotated(paddle.bernoulli, Placement((0, -1)), 0)
    (drawing,) = (op for op in program.global_block().ops if op.name() == "pd_op.bernoulli")
    assert drawing.operand_source(0).get_defining_op().name() == "dist_op.reshard"
    assert placement_of(drawing.result(0)) == Placement((-1, -1))
    question = Question("bernoulli", (), (("x", (Operand((8, 16), "float32", Placement((0, -1)), True),)),))
    (use,) = Oracle(ProcessMesh(("mp",), (2,), (0, 1))).forward(question).uses
    assert (use.have, use.need) == (Placement((0, -1)), Placement((-1, -1)))


def test_every_random_op_takes_its_stream_in_one_way() -> None:
    assert not SEED_OPERANDS.keys() & STREAM_ATTRIBUTES.keys()
    assert not DEVICE_OPS & {*SEED_OPERANDS, *STREAM_ATTRIBUTES}
    assert {"dropout", "uniform", "gaussian", "bernoulli", "randint", "randperm", "multinomial"} <= RANDOM_OPS


def test_an_op_that_drops_nothing_draws_nothing() -> None:
    assert draws("dropout", {"p": 0.5, "is_test": False})
    assert not draws("dropout", {"p": 0.0})
    assert not draws("dropout", {"p": 0.5, "is_test": True})
    assert not draws("flash_attn", {"dropout": 0.0})
    assert draws("exponential_", {"lam": 1.0})
    assert not draws("matmul", {})


def test_the_axes_that_shard_a_result_choose_its_stream() -> None:
    mesh = ProcessMesh(("dp", "mp"), (2, 2), (0, 1, 2, 3))
    streams = {rank: coordinates(Placement((0, -1, 1)), mesh, rank) for rank in mesh.ranks}
    assert len(set(streams.values())) == 4
    assert [coordinates(Placement((-1, 1)), mesh, rank) for rank in mesh.ranks] == ["mp=0", "mp=1", "mp=0", "mp=1"]
    assert coordinates(Placement((-1, -1)), mesh, 3) == ""
    assert coordinates(Placement((0, 1)), ProcessMesh(("dp", "mp"), (1, 1), (0,)), 0) == ""


def test_a_step_starts_from_its_own_seed_and_gives_the_generator_back() -> None:
    streams = Streams(Source(3), ("rule_based_tuner/test",), device="")
    paddle.seed(1)
    outside = paddle.rand([4]).tolist()
    paddle.seed(1)
    with streams.of_next_step():
        first = paddle.rand([4]).tolist()
    assert paddle.rand([4]).tolist() == outside
    with streams.of_next_step():
        assert paddle.rand([4]).tolist() != first
    streams.source.step = 0
    paddle.seed(2)
    with streams.of_next_step():
        assert paddle.rand([4]).tolist() == first


def test_a_seed_is_never_zero_and_fits_into_what_paddle_reads_of_it() -> None:
    seeds = {hashed(1, name) for name in range(2000)}
    assert len(seeds) == 2000
    assert all(0 < seed < 2**31 for seed in seeds)
    generator = paddle.base.core.default_cpu_generator()
    with seeded(generator, 5):
        first = paddle.rand([2]).tolist()
    with seeded(generator, 5):
        assert paddle.rand([2]).tolist() == first
