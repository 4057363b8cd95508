"""Plans of earlier runs: read again only where planning would give the same plan."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small import SMALL_GPT

from paddle_rbt_plugin import tuner
from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.handover.pir.configs import config_graph
from paddle_rbt_plugin.pattern import Builder, Pattern, compile_pattern
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.request import Constraint, Request

GRAPHS = {batch: config_graph(SMALL_GPT, batch) for batch in (8, 16)}
BASE: dict[str, Any] = {"cluster": "1x4:A100-80G"}


class Linear(Pattern):
    """A pattern that a caller brings along."""

    name = "linear_of_the_caller"

    def build(self, g: Builder) -> None:
        g.op("matmul", g.data("x"), g.param("weight"))

    shard = {"x": ("dp", ...)}


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The levels of the searches that ran."""
    ran: list[str] = []

    def run_level(search: Any, level: str) -> Any:
        ran.append(level)
        return original(search, level)

    original = tuner.run_level
    monkeypatch.setattr(tuner, "run_level", run_level)
    return ran


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., Plan]:
    def plan(batch: int = 8, cache: object = tmp_path, settings: dict[str, Any] = BASE, **request: Any) -> Plan:
        return tuner.tune_graph(GRAPHS[batch], Request(Settings(**(BASE | settings), cache=str(cache)), **request))

    return plan


def test_the_same_request_gives_the_same_plan_without_a_search(planned: Any, searches: list[str], tmp_path: Path) -> None:
    first = planned()
    told: list[Any] = []
    second = planned(settings={"save_path": str(tmp_path / "plan.json")}, progress=told.append)
    assert searches == ["o1"]
    assert second.to_dict() == first.to_dict() == Plan.load(tmp_path / "plan.json").to_dict()
    assert [(p.done, p.total, p.best, p.is_estimated) for p in told] == [(1, 1, first.candidates[0], True)]


@pytest.mark.parametrize(
    "other",
    [
        {"batch": 16},
        {"global_batch": 16},
        {"precision": "bf16"},
        {"rewrite": False},
        {"assumed": ("fused_attention",)},
        {"constraints": (Constraint("a test", {"mp": (1,)}),)},
        {"settings": {"level": "o2"}},
        {"settings": {"cluster": "1x4:V100-32G"}},
        {"settings": {"search_space": {"mp": 2}}},
        {"settings": {"memory_reserve": 0.5}},
        {"settings": {"blocked_plugins": ("ffn",)}},
    ],
    ids=str,
)
def test_another_request_is_planned_anew(planned: Any, searches: list[str], other: dict[str, Any]) -> None:
    planned()
    assert planned(**other).to_dict() == planned(cache="off", **other).to_dict()
    assert len(searches) == 3


def test_a_plan_that_depends_on_code_of_others_is_not_remembered(planned: Any, searches: list[str]) -> None:
    for _ in range(2):
        planned(patterns=(compile_pattern(Linear),))
    assert len(searches) == 2


def test_a_search_cut_short_is_not_remembered(planned: Any, searches: list[str]) -> None:
    planned(settings={"time_limit": 0.0})
    whole = planned()
    assert len(searches) == 2
    assert planned(settings={"time_limit": 0.0}).to_dict() == whole.to_dict()
    assert len(searches) == 2


def test_a_broken_file_is_planned_anew(planned: Any, searches: list[str], tmp_path: Path) -> None:
    first = planned()
    (file,) = tmp_path.rglob("plan-*")
    for broken in (b"", b"{}", file.read_bytes()[:-20], file.read_bytes().replace(b"degrees", b"degreez")):
        file.write_bytes(broken)
        assert planned().to_dict() == first.to_dict()
    assert len(searches) == 5
