"""Attributes of the pass that cannot be right, and settings that contradict the plan they load."""

from __future__ import annotations

from pathlib import Path

import paddle
import pytest
from paddle.distributed.passes.pass_base import PassContext, new_pass
from small import SMALL_GPT, lazy_gpt, traced_gpt

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.models import input_spec
from paddle_rbt_plugin.request import Constraint, Request
from paddle_rbt_plugin.tuner import tune_graph

CLUSTER = "1x2:A100-80G"


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"loss": 5}, "the loss given, '5', is not a value of the program"),
        ({"loss": "mean"}, "the loss given, 'mean', is not a value of the program"),
        ({"global_batch": "8"}, "global_batch must be a whole number from 1"),
        ({"global_batch": -8}, "global_batch must be a whole number from 1"),
        ({"precision": "fp8"}, "precision must be one of fp32, fp16, bf16, not 'fp8'"),
        ({"levle": "o1"}, "did you mean level"),
    ],
)
def test_a_wrong_attribute_of_the_pass_is_a_clear_error(attrs: dict, message: str) -> None:
    program = traced_gpt().program
    with pytest.raises(rbt.TunerError, match=message):
        new_pass("rule_based_tuner", {"cluster": CLUSTER, **attrs}).apply([program], [paddle.static.Program()], PassContext())


def test_attributes_of_none_are_as_if_not_given() -> None:
    context = PassContext()
    attrs = {"cluster": "1x1:CPU", "global_batch": None, "precision": None, "loss": None}
    new_pass("rule_based_tuner", attrs).apply([traced_gpt().program], [paddle.static.Program()], context)
    assert context.get_attr("plan").precision == "fp32"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    tune(save_path=str(path), search_space={"mp": 2}, precision="bf16")
    return path


def tune(**settings) -> rbt.Plan:
    return rbt.tune(lazy_gpt(), input_spec=input_spec(SMALL_GPT, 8), cluster=CLUSTER, **settings)


def test_a_plan_that_the_search_space_rules_out_is_not_loaded(saved: Path) -> None:
    with pytest.raises(rbt.PlanError, match=r"plan.json' has mp 2, but search_space allows mp 1 only; plan again"):
        tune(load_path=str(saved), search_space={"mp": 1})
    inside = {"mp": [1, 2], "pp": 1, "order": "mp_dp", "schedule": "VPP"}
    assert tune(load_path=str(saved), search_space=inside).degrees["mp"] == 2, "order and schedule mean nothing here"


def test_a_plan_made_for_another_precision_is_warned_about(saved: Path) -> None:
    with pytest.warns(rbt.TunerWarning, match="made for training in bf16, not in fp16"):
        tune(load_path=str(saved), precision="fp16")


@pytest.mark.filterwarnings("error::paddle_rbt_plugin.TunerWarning")
def test_without_a_precision_that_of_the_plan_counts(saved: Path) -> None:
    assert tune(load_path=str(saved)).precision == "bf16"


def test_what_the_strategy_of_the_job_does_otherwise_than_the_loaded_plan_is_said(tmp_path: Path) -> None:
    path, graph = tmp_path / "plan.json", traced_gpt().graph
    settings = Settings(cluster=CLUSTER, save_path=path, search_space={"dp": 2, "sharding_stage": 2, "accumulate_steps": 2})
    tune_graph(graph, Request(settings))
    job = [Constraint("strategy.sharding", {"sharding_stage": (0,)})]
    with pytest.warns(rbt.TunerWarning, match=r"not applied: sharding_stage 2 \(strategy.sharding allows 0 only\)"):
        plan = tune_graph(graph, Request(Settings(cluster=CLUSTER, load_path=path), constraints=tuple(job)))
    assert "plan.to_strategy()" in plan.notes[-1]
