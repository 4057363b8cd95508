"""Settings of the tuner: every wrong value is named with what would be right."""

from __future__ import annotations

import pytest

from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.errors import TunerError


def test_values_of_none_keep_the_defaults() -> None:
    assert Settings.from_mapping({"level": None, "memory_reserve": None}) == Settings()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"levle": "o1"}, "did you mean level"),
        ({"level": "o9"}, "level must be one of o1, o2, o3, not 'o9'"),
        ({"cost_model": 3}, "cost_model must be the name of a cost model"),
        ({"memory_reserve": 1.0}, "memory_reserve"),
        ({"memory_reserve": "10%"}, "memory_reserve"),
        ({"memory_reserve": True}, "memory_reserve"),
        ({"search_space": [("mp", 2)]}, "search_space must be a dict"),
        ({"save_path": 7}, "save_path must be a path"),
    ],
)
def test_wrong_values_are_refused(values: dict, message: str) -> None:
    with pytest.raises(TunerError, match=message):
        Settings.from_mapping(values)


def test_a_single_blocked_plugin_may_be_a_string() -> None:
    assert Settings.from_mapping({"blocked_plugins": "qkv"}).blocked_plugins == ("qkv",)
