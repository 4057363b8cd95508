"""Plan files: what is refused, by which field, and that nothing is lost on the way."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import paddle
import pytest
from small import SMALL_GPT, lazy_gpt, traced_gpt

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.handover.pir.verification import verify
from paddle_rbt_plugin.models import build, input_spec


@pytest.fixture(scope="module")
def plan() -> rbt.Plan:
    space = {"dp": 2, "mp": 2, "pp": 1}
    return rbt.tune(lazy_gpt(), input_spec=input_spec(SMALL_GPT, 8), cluster="1x4:A100-80G", search_space=space)


def test_saving_and_loading_changes_nothing(plan: rbt.Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert rbt.Plan.load(path).to_dict() == plan.to_dict()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (("schema",), 3, "schema 3"),
        (("degrees", "mp"), 99, "do not use the 4 devices"),
        (("degrees", "mp"), 2.0, "degrees/mp"),
        (("ep",), 3, "ep 3 is neither 1 nor degrees/dp 2"),
        (("sharding_degree",), 3, "sharding_degree 3 does not divide degrees/dp 2"),
        (("micro_batch",), 3, "micro_batch 3 x accumulate_steps . x degrees/dp 2 is not global_batch 8"),
        (("schedule",), "VPP", "'VPP' with vpp 1"),
        (("vpp",), 2, "with vpp 2"),
        (("stages", 0, "layers"), [1, 1], "begin with 1, not with 0"),
        (("stages", 0, "layers"), [0, 10**20], "stages/0/layers/1"),
        (("stages", 0, "axes"), ["dp", "sp"], "is not degrees"),
        (("cost_model",), {"name": "x"}, "cost_model: 'distribution'"),
        (("model",), {"seq": 2**63}, "model/seq"),
        (("model",), {"seq": 3_000_000_000}, "model/seq"),
        (("candidates", 0, "ep"), "x", "candidates/0/ep"),
        (("estimate", "step_time_s"), 0, "estimate/step_time_s"),
        (("estimate", "step_time_s"), 10**400, "estimate/step_time_s: the number is too large"),
        (("estimate", "peak_memory_bytes"), 10**400, "estimate/peak_memory_bytes: the number is too large"),
        (("estimate", "peak_memory_bytes"), 0, "estimate/peak_memory_bytes"),
        (("stages", 0, "devices"), [100, 101, 102, 103], "do not use the 4 devices"),
        (("stages", 0, "axes"), ["dp", "foo"], "stages/0/axes"),
        (("stages", 0, "layers"), [1, 0], "end before they begin"),
        (("stages", 0, "mesh"), [3, 2], "does not arrange"),
        (("tensors", "tokens", "dims_mapping"), [0, 0], "tensors/tokens"),
        (("tensors", "tokens", "dims_mapping"), [0], "tensors/tokens"),
        (("tensors", "tokens", "stage"), 7, "tensors/tokens"),
        (("patterns", "qkv"), {}, "patterns/qkv"),
        (("candidates", 0, "mp"), [], "candidates/0"),
        (("rejected",), [{"candidate": {}, "kind": "other", "figures": {}, "reason": "none"}], "rejected/0"),
        (("rejected", 0, "kind"), 7, "rejected/0/kind"),
        (("unmatched",), ["head.weight [64, 512], read by matmul_9"], "unmatched/0"),
        (("unmatched",), ["\x1b]0;title\x07"], "cannot be printed"),
        (("unmatched",), ["\ud800"], "cannot be printed"),
        (("estimate", "step_time_s"), float("nan"), "NaN is no number"),
        (("cluster",), {}, "cluster|machines|groups"),
    ],
)
def test_a_changed_file_is_refused_by_field(plan: rbt.Plan, tmp_path: Path, field: tuple, value, message: str) -> None:
    data = copy.deepcopy(plan.to_dict())
    place = data
    for key in field[:-1]:
        place = place[key]
    place[field[-1]] = value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(rbt.TunerError, match=message):
        rbt.Plan.load(path)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([((0, 0), (0, 1)), ((0, 1), (2, 3))], "stages/1: its layers begin with 0, but stages/0 end with 0"),
        ([((0, 0), (0, 1)), ((2, 2), (2, 3))], "stages/1: its layers begin with 2, but stages/0 end with 0"),
        ([((0, 0), (0, 1)), ((1, 1), (1, 2))], "pipeline stages of degrees/pp share devices"),
        ([((0, 0), (0, 1)), ((1, 1), (0, 1))], "1 chunks of the model one after the other, not degrees/pp 2 x vpp 1"),
        ([((0, 0), (0, 1)), ((1, 1), (2,))], "stages/1: it has 1 devices"),
    ],
)
def test_stages_that_contradict_each_other_are_refused(plan: rbt.Plan, stages: list, message: str) -> None:
    data = plan.to_dict() | {"degrees": {"pp": 2, "dp": 2, "mp": 1}}
    data["stages"] = [
        {"layers": [*layers], "devices": [*ranks], "mesh": [len(ranks)], "axes": ["dp"]} for layers, ranks in stages
    ]
    data["tensors"] = {name: t | {"dims_mapping": [-1] * len(t["dims_mapping"])} for name, t in data["tensors"].items()}
    with pytest.raises(rbt.PlanError, match=message):
        rbt.Plan.from_dict(data)


def test_a_layer_that_the_program_has_and_the_plan_lacks_is_named(plan: rbt.Plan) -> None:
    stages = tuple(replace(stage, layers=(0, 0)) for stage in plan.stages)
    trace = traced_gpt()
    with pytest.raises(rbt.PlanError, match="run 1 layers, but the program has 2"):
        verify(replace(plan, stages=stages), trace.graph, trace.program)


@pytest.mark.parametrize("text", ["", "[" * 100_000, "{", "[1]", '"plan"', "null"])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(rbt.PlanError, match="is not a plan"):
        rbt.Plan.load(path)


def test_a_path_that_is_none_is_refused() -> None:
    with pytest.raises(rbt.PlanError, match="from a path"):
        rbt.Plan.load(None)


def test_a_plan_for_a_cluster_with_other_figures_is_refused(plan: rbt.Plan) -> None:
    other = rbt.parse_cluster({"machines": 1, "devices_per_machine": 4, "device": "A100-80G", "memory": "1 GiB"})
    with pytest.raises(rbt.PlanError, match="other figures"):
        plan.check_cluster(other)


class TestShardLayer:
    """Refuses what the plan is not for, before anything is changed."""

    def test_a_job_of_another_size(self, plan: rbt.Plan) -> None:
        with pytest.raises(rbt.ClusterError, match="4 devices, but the running job has 1"):
            plan.shard_layer(build(SMALL_GPT))

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (replace(SMALL_GPT, layers=1), "lacks gpt.layers.1"),
            (replace(SMALL_GPT, layers=3), "does not place gpt.layers.2"),
            (replace(SMALL_GPT, ffn=128), r"has the shape \[32, 128\], but \[32, 64\] in the plan"),
        ],
    )
    def test_another_model(self, config, message: str) -> None:
        single = rbt.tune(lazy_gpt(), input_spec=input_spec(SMALL_GPT, 8), cluster="1x1:CPU")
        with pytest.raises(rbt.PlanError, match=message):
            single.shard_layer(build(config))

    def test_something_that_is_no_layer(self, plan: rbt.Plan) -> None:
        with pytest.raises(rbt.TunerError, match=r"a paddle\.nn\.Layer"):
            plan.shard_layer(None)


class TestShardDataloader:
    """Batches must be those of the program."""

    @pytest.fixture
    def loader(self):
        single = rbt.tune(lazy_gpt(), input_spec=input_spec(SMALL_GPT, 8), cluster="1x1:CPU")
        return single.shard_dataloader([])

    def test_a_batch_that_lacks_an_input(self, loader) -> None:
        with pytest.raises(rbt.PlanError, match="lacks the input"):
            loader.shard({"tokens": paddle.ones([8, 16], "int64")})
        with pytest.raises(rbt.PlanError, match="fewer tensors"):
            loader.shard([paddle.ones([8, 16], "int64")])

    def test_an_input_that_the_program_does_not_read(self, loader) -> None:
        with pytest.raises(rbt.PlanError, match="no input 'ids'"):
            loader.shard({"ids": paddle.ones([8, 16], "int64")})
