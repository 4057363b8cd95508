"""The Strategy of a plan, and what its notes say about the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from searching import gpt_analysis

from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.errors import PlanError, TunerError
from paddle_rbt_plugin.handover.pir.pipeline import check_order
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.request import Request
from paddle_rbt_plugin.tuner import tune_graph


def planned(cluster="1x8:A100-80G", level="o1", precision="bf16", batch=24, **space):
    return tune_graph(
        gpt_analysis(4, batch).graph,
        Request(Settings(cluster=cluster, search_space=space, level=level), precision=precision, global_batch=batch),
    )


def test_a_pipeline_plan_sets_the_pipeline() -> None:
    plan = planned(pp=2, dp=2, mp=2, micro_batch=2, schedule="FThenB", sharding_stage=0)
    strategy = plan.to_strategy()
    assert strategy.pipeline.enable
    assert strategy.pipeline.schedule_mode == "FThenB"
    assert (strategy.pipeline.micro_batch_size, strategy.pipeline.accumulate_steps) == (2, 6)
    assert (strategy.pipeline.pp_degree, strategy.pipeline.vpp_degree) == (2, 1)
    assert not strategy.gradient_merge.enable
    assert not strategy.sharding.enable


def test_an_interleaved_plan_sets_its_chunks() -> None:
    strategy = planned(pp=2, vpp=2, micro_batch=2).to_strategy()
    assert (strategy.pipeline.schedule_mode, strategy.pipeline.pp_degree, strategy.pipeline.vpp_degree) == ("VPP", 2, 2)


def test_a_plan_of_one_stage_accumulates_by_merging_gradients() -> None:
    strategy = planned(pp=1, dp=4, mp=2, micro_batch=2).to_strategy()
    assert not strategy.pipeline.enable
    assert strategy.gradient_merge.enable
    assert strategy.gradient_merge.k_steps == 3
    assert strategy.gradient_merge.avg


def test_nothing_is_enabled_that_the_plan_does_not_need() -> None:
    space = {"pp": 1, "dp": 8, "mp": 1, "accumulate_steps": 1, "sharding_stage": 0, "recompute": "none"}
    strategy = planned(precision="fp32", **space).to_strategy()
    for part in (strategy.pipeline, strategy.gradient_merge, strategy._recompute, strategy.sharding, strategy.amp):
        assert not part.enable


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_half_precision_recomputation_and_sharding_are_set(precision, dtype) -> None:
    space = {"pp": 1, "dp": 8, "mp": 1, "sharding_stage": 2, "recompute": "full"}
    strategy = planned(precision=precision, **space).to_strategy()
    assert (strategy.amp.enable, strategy.amp.dtype, strategy.amp.level) == (True, dtype, "O2")
    assert strategy._recompute.enable
    assert (strategy.sharding.enable, strategy.sharding.stage, strategy.sharding.degree) == (True, 2, 8)


def test_states_split_over_a_part_of_the_replicas_are_set_and_said_not_to_be_applied() -> None:
    plan = planned(pp=1, dp=8, mp=1, sharding_stage=3, sharding_degree=4)
    assert plan.to_strategy().sharding.degree == 4
    assert any(note.startswith("recommended, not applied: states split over 4 of 8 replicas") for note in plan.notes)


def test_what_no_hand_over_applies_is_recommended_and_said_to_be() -> None:
    notes = planned(sequence_parallel=True, mp=2, pp=1).notes
    assert any(n.startswith("recommended, not applied: sequence parallelism") for n in notes)


@pytest.mark.parametrize(("recompute", "said"), [("selective", True), ("full", False)])
def test_recomputation_of_attention_cores_is_said_to_be_applied_to_programs_only(recompute, said) -> None:
    notes = planned(recompute=recompute, pp=1, sequence_parallel=False).notes
    assert (
        any(n.startswith("recomputation of the attention cores is applied to static programs; dygraph") for n in notes) == said
    )
    assert not any("recommended" in n for n in notes)


@pytest.mark.parametrize("schedule", ["1F1B", "FThenB", "VPP"])
def test_a_plan_that_is_applied_as_it_is_recommends_nothing(schedule) -> None:
    plan = planned(pp=2, schedule=schedule, sequence_parallel=False, recompute="none")
    assert not any("recommended" in n for n in plan.notes)


def test_the_stages_of_every_level_cover_the_layers_in_order_and_survive_saving(tmp_path) -> None:
    for level, cluster in (("o1", "1x8:A100-80G"), ("o2", "1x4:A100-80G+1x4:V100-32G"), ("o3", "1x4:V100-32G+1x4:A100-80G")):
        plan = planned(cluster, level, "fp16", pp=2, micro_batch=[1, 2])
        layers = [n for s in plan.stages for n in range(s.layers[0], s.layers[1] + 1)]
        assert layers == list(range(4))
        assert {d for s in plan.stages for d in s.devices} == set(range(8))
        assert {t.stage for t in plan.tensors.values()} <= set(range(len(plan.stages)))
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan
        assert plan.explain()


def test_a_plan_of_stages_in_another_order_than_their_ranks_does_not_train() -> None:
    plan = planned(pp=2)
    check_order(plan)
    with pytest.raises(TunerError, match="begin with the ranks 4, 0"):
        check_order(replace(plan, stages=plan.stages[::-1]))


def test_a_recomputation_that_does_not_exist_is_refused_where_it_stands() -> None:
    data = planned(pp=1).to_dict()
    data["stages"][0]["recompute"] = "some"
    with pytest.raises(PlanError, match="stages/0/recompute"):
        Plan.from_dict(data)


def test_the_time_limit_is_a_number_of_seconds() -> None:
    assert Settings(time_limit=2.5).time_limit == 2.5
    for wrong in (float("nan"), -1, "soon", True):
        with pytest.raises(TunerError, match="time_limit must be a number of seconds"):
            Settings(time_limit=wrong)
