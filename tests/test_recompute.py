"""What a plan recomputes is marked in the program, for Paddle's recompute pass, and costed as that pass runs it again."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import paddle
import pytest
from launching import launch
from paddle import nn
from paddle.distributed.fleet import auto
from small import SMALL_GPT, static_program, traced_gpt

from paddle_rbt_plugin.completion import Collective, Kernel, Placement, Value
from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.cost.recompute import run_again
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.pir.recompute import constraints, is_allowed, is_marked, mark, switched_on
from paddle_rbt_plugin.handover.pir.trace import Trace
from paddle_rbt_plugin.handover.pir.verification import verify
from paddle_rbt_plugin.handover.shared.recompute import recomputes
from paddle_rbt_plugin.layers import cluster_layers
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.request import Constraint, Request
from paddle_rbt_plugin.tuner import tune_graph

MARK = "fwd_recompute_id"


def planned(traced: Trace, recompute: str) -> Plan:
    space = {"mp": 2, "dp": 1, "pp": 1, "recompute": recompute}
    return tune_graph(traced.graph, Request(Settings(cluster="1x2:A100-80G", search_space=space)))


def marked(traced: Trace, plan: Plan) -> list[tuple[str, int]]:
    """Type and number of every marked op of a program."""
    program = traced.program.clone()
    mark(program, traced.graph, plan)
    return [(op.name().split(".")[1], op.attrs()[MARK]) for op in program.global_block().ops if op.has_attr(MARK)]


def strategy(enable: bool) -> auto.Strategy:
    made = auto.Strategy()
    made.recompute.enable = enable
    return made


def allowed(made: auto.Strategy, program: object) -> tuple[str, ...] | None:
    limits = constraints(made, program)
    return limits[0].values["recompute"] if limits else None


def test_full_recomputation_marks_every_op_of_every_layer_and_no_other() -> None:
    traced = traced_gpt()
    found = Counter(number for _, number in marked(traced, planned(traced, "full")))
    assert list(found.values()) == [len(block.ops) for block in cluster_layers(traced.graph).blocks]


def test_selective_recomputation_marks_the_attention_cores() -> None:
    traced = traced_gpt()
    found = marked(traced, planned(traced, "selective"))
    types = [type_ for type_, number in found if number == 1]
    assert (types[0], types[-1], types.count("softmax"), types.count("matmul")) == ("matmul", "matmul", 1, 2)
    assert {number for _, number in found} == {1, 2}


def test_nothing_is_marked_where_nothing_is_recomputed() -> None:
    traced = traced_gpt()
    plan = planned(traced, "none")
    assert not recomputes(plan)
    assert marked(traced, plan) == []


def test_only_the_layers_that_the_plan_names_are_marked() -> None:
    traced = traced_gpt()
    plan = planned(traced, "none")
    (stage,) = plan.stages
    halves = (replace(stage, layers=(0, 0), recompute="full"), replace(stage, layers=(1, 1), recompute="none"))
    found = marked(traced, replace(plan, stages=halves))
    assert len(found) == len(cluster_layers(traced.graph).blocks[0].ops)
    assert {number for _, number in found} == {1}


def test_regions_that_the_model_marks_stay_as_they_are() -> None:
    traced = traced_gpt()
    program = traced.program.clone()
    program.global_block().ops[-2].set_int_attr(MARK, 7)
    mark(program, traced.graph, planned(traced, "full"))
    assert [op.attrs()[MARK] for op in program.global_block().ops if op.has_attr(MARK)] == [7]
    assert allowed(strategy(True), program) == ("full",)
    assert allowed(strategy(False), program) == ("none", "full")


def test_a_strategy_that_says_nothing_leaves_recomputation_to_the_planner() -> None:
    program = traced_gpt().program
    assert not is_marked(program)
    assert allowed(strategy(False), program) is None
    assert allowed(strategy(True), program) == ("selective", "full")


def test_layers_that_draw_random_numbers_are_recomputed() -> None:
    program = traced_gpt(replace(SMALL_GPT, dropout=0.1)).program
    assert allowed(strategy(False), program) is None
    assert allowed(strategy(True), program) == ("selective", "full")


def test_layers_that_change_their_operands_are_not_recomputed() -> None:
    def build_forward() -> None:
        blocks = (layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.BatchNorm1D(16), nn.ReLU()))
        paddle.mean(nn.Sequential(*blocks)(paddle.static.data("x", [8, 16], "float32")))

    (limit,) = constraints(strategy(False), static_program(build_forward))
    assert limit.values["recompute"] == ("none",)
    assert "batch_norm_0 in the layers modifies its operands" in limit.reason
    with pytest.raises(TunerError, match=r"modifies its operands.*train without recomputation or without such ops"):
        constraints(strategy(True), static_program(build_forward))


def test_a_loaded_plan_recomputes_only_what_the_job_allows() -> None:
    plan = planned(traced_gpt(), "full")
    assert is_allowed(plan, [Constraint("a", {"recompute": ("none", "full")}), Constraint("b", {"pp": (1,)})])
    assert not is_allowed(plan, [Constraint("a", {"recompute": ("none",)})])


def test_the_strategy_of_the_user_is_as_it_was() -> None:
    traced = traced_gpt()
    plan, program, made = planned(traced, "full"), traced.program.clone(), strategy(False)
    mark(program, traced.graph, plan)
    with switched_on(made, program, plan):
        assert made.recompute.enable
    assert not made.recompute.enable
    with switched_on(made, traced.program, plan):  # nothing is marked
        assert not made.recompute.enable


def test_backward_runs_no_op_again_that_nothing_reads_and_communicates_no_value_from_outside() -> None:
    x, h, y = (Value(name, (8, 8), "float32", Placement((-1, -1))) for name in ("x", "h", "y"))

    def reduced(v: Value) -> tuple[Collective, ...]:
        return (Collective("all_reduce", "mp", v, "forward"),)

    forward = (
        Kernel("matmul", "forward", (x, x), (h,), reduced(x)),
        Kernel("add", "forward", (h, x), (y,), reduced(h)),
    )
    again = run_again(forward, (0, 1), whole=False)
    assert [(k.type, k.collectives) for k in again.values()] == [("matmul", ()), ("reshard", reduced(h))]
    whole = run_again(forward, (0, 1), whole=True)
    assert [k.type for k in whole.values()] == ["matmul", "add"]


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_what_backward_runs_again_of_layers_that_drop_values_is_predicted(recompute: str) -> None:
    traced = traced_gpt(replace(SMALL_GPT, dropout=0.1))
    (compared,) = verify(planned(traced, recompute), traced.graph, traced.program)
    assert compared.differences == ()


def test_backward_keeps_what_random_ops_drew_unless_they_read_a_seed() -> None:
    x, noise, h, y = (Value(name, (8, 8), "float32", Placement((-1, -1))) for name in ("x", "noise", "h", "y"))
    forward = (
        Kernel("gaussian", "forward", (), (noise,)),
        Kernel("add", "forward", (x, noise), (h,), (Collective("all_reduce", "mp", noise, "forward"),)),
        Kernel("dropout", "forward", (h,), (y,), attrs={"p": 0.5}),
        Kernel("matmul", "forward", (y, y), (x,)),
    )
    again = run_again(forward, range(4), whole=False)
    assert [k.type for k in again.values()] == ["add", "dropout", "matmul"]
    assert again[1].collectives == ()  # what was drawn is there, and lies where it is needed
    assert len(run_again(forward, range(4), whole=True)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("space", [{"mp": 2, "recompute": "full"}, {"dp": 2, "recompute": "selective"}], ids=str)
def test_training_with_recomputation_gives_the_serial_loss(tmp_path: Path, space: dict) -> None:
    for name in ("serial", "engine"):
        (tmp_path / name).mkdir()
    serial = launch("entry_points.py", 1, tmp_path / "serial" / "result.json", "serial", "{}", "4")
    result = launch("entry_points.py", 2, tmp_path / "engine" / "result.json", "engine-attributes", json.dumps(space), "4")
    assert result["plan"]["recompute"] == space["recompute"]
    assert result["recomputed_ops"] > 0
    np.testing.assert_allclose(result["losses"], serial["losses"], rtol=0, atol=1e-5)
