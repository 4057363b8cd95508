"""What ``strategy.tuning`` and the rest of a strategy mean to the tuner."""

from __future__ import annotations

import paddle.distributed as dist
import pytest
from paddle.distributed.auto_parallel import constants
from paddle.distributed.fleet import auto
from searching import gpt_analysis

from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.shared import strategy as shared_strategy
from paddle_rbt_plugin.handover.shared.strategy import (
    as_the_program_runs,
    constraints_of,
    is_enabled,
    precision_of,
    settings_of,
)
from paddle_rbt_plugin.request import Request
from paddle_rbt_plugin.tuner import tune_graph

TUNING = {"enable": True, "pass_name": "rule_based_tuner", "level": "o1", "search_space": {"mp": [1, 2]}, "memory_reserve": 0.2}


@pytest.mark.parametrize("strategy", [auto.Strategy, dist.Strategy])
def test_a_dict_and_attributes_mean_the_same(strategy) -> None:
    by_dict, by_attributes = strategy({"tuning": TUNING}), strategy()
    for name, value in TUNING.items():
        setattr(by_attributes.tuning, name, value)
    assert settings_of(by_dict.tuning) == settings_of(by_attributes.tuning)
    assert settings_of(by_dict.tuning) == Settings(search_space={"mp": [1, 2]}, memory_reserve=0.2)
    assert is_enabled(by_dict.tuning) and is_enabled(by_attributes.tuning)


def test_enabling_without_a_pass_name_keeps_the_meaning_it_has_in_paddle() -> None:
    strategy = auto.Strategy({"tuning": {"enable": True}})
    assert not is_enabled(strategy.tuning)


def test_a_strategy_made_before_the_package_was_imported_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    known = constants.get_category_default_config(constants.TUNING)
    for name in ("pass_name", *Settings.names()):
        monkeypatch.delitem(known, name)
    strategy = auto.Strategy({"tuning": TUNING})
    monkeypatch.undo()
    assert not hasattr(strategy.tuning, "pass_name")
    assert is_enabled(strategy.tuning)
    assert settings_of(strategy.tuning).search_space == {"mp": [1, 2]}


def test_a_misspelt_field_is_named_whether_from_a_dict_or_an_attribute() -> None:
    with pytest.raises(TunerError, match="no field 'serch_space'; did you mean 'search_space'"):
        settings_of(auto.Strategy({"tuning": {**TUNING, "serch_space": {}}}).tuning)
    strategy = auto.Strategy({"tuning": TUNING})
    strategy.tuning.levle = "o1"
    with pytest.raises(TunerError, match="no field 'levle'; did you mean 'level'"):
        settings_of(strategy.tuning)


def test_what_the_strategy_says_elsewhere_is_a_constraint() -> None:
    strategy = auto.Strategy()
    strategy.gradient_merge.enable, strategy.gradient_merge.k_steps = True, 4
    strategy.amp.enable, strategy.amp.dtype = True, "bfloat16"
    fixed = {key: values for c in constraints_of(strategy) for key, values in c.values.items()}
    assert fixed["accumulate_steps"] == (4,)
    assert precision_of(strategy) == "bf16"


@pytest.mark.parametrize("vpp", [1, 2])
def test_an_interleaved_schedule_of_the_strategy_is_a_constraint(vpp: int) -> None:
    strategy = auto.Strategy()
    strategy.pipeline.enable, strategy.pipeline.schedule_mode, strategy.pipeline.vpp_degree = True, "VPP", vpp
    fixed = {key: values for c in constraints_of(strategy) for key, values in c.values.items()}
    assert fixed["schedule"] == ("VPP",)
    assert fixed.get("vpp") == ((2,) if vpp == 2 else None)


def test_a_paddle_that_cannot_interleave_leaves_the_other_schedules_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_strategy, "can_interleave", lambda: False)
    (limit,) = (c for c in constraints_of(auto.Strategy()) if "vpp" in c.values)
    assert limit.values == {"schedule": ("1F1B", "FThenB"), "vpp": (1,)}
    assert "Paddle 3.0" in limit.reason


def test_a_job_on_gpus_may_interleave() -> None:
    settings, limits = Settings(cluster="1x4:A100-80G"), as_the_program_runs(steps=8, pipeline=True, not_interleaved=None)
    plan = tune_graph(gpt_analysis(8, 8).graph, Request(settings, global_batch=64, constraints=tuple(limits)))
    assert any(c["schedule"] == "VPP" for c in plan.candidates)


def test_the_pass_alone_does_not_interleave_and_says_why() -> None:
    settings, limits = Settings(cluster="1x2:A100-80G", search_space={"vpp": 2}), as_the_program_runs(pipeline=True)
    with pytest.raises(TunerError, match=r"outside of auto\.Engine and dist\.to_static needs vpp in \[1\]"):
        tune_graph(gpt_analysis(4, 8).graph, Request(settings, constraints=tuple(limits)))
