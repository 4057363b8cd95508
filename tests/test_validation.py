"""The one layer that checks what users write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from paddle_rbt_plugin.errors import ModelError, TunerError
from paddle_rbt_plugin.validation import check, check_fields, check_known, nearest, number, one_of, shown, suggest, whole


@dataclass(frozen=True)
class Checked:
    size: Annotated[int, whole(1, 8)] = 1
    anything: Any = None

    def __post_init__(self) -> None:
        check_fields(self, ModelError)


@pytest.mark.parametrize("value", [0, 9, True, 1.0, "1", None, [1], 10**400, float("nan")])
def test_a_field_that_is_not_of_its_kind_is_refused_with_what_would_be_right(value: object) -> None:
    with pytest.raises(ModelError, match=r"^size must be a whole number from 1 to 8, not "):
        Checked(size=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "0.5", 0, None])
def test_a_number_is_finite_and_within_its_bounds(value: object) -> None:
    with pytest.raises(TunerError, match=r"^f\.yaml: rate must be a number above 0, not "):
        check(number("above 0", gt=0), "rate", value, place="f.yaml: ")


@pytest.mark.parametrize("value", ["c", ["a"], {}, 1])
def test_a_choice_that_is_none_lists_the_options(value: object) -> None:
    with pytest.raises(TunerError, match=r"^mode must be one of a, b, not "):
        check(one_of("a", "b"), "mode", value)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(TunerError, match=r"^no field 'hiden'; did you mean hidden\?$"):
        check_known("no field", ["heads", "hiden"], ["heads", "hidden"])
    with pytest.raises(TunerError, match=r"^no field 'tp'; did you mean mp\?$"):
        check_known("no field", ["tp"], ["pp", "mp"], aliases={"tp": "mp"})
    assert nearest("zzz", ["pp", "mp"]) == "known: pp, mp"
    assert suggest("a100", ["A100-40G", "V100"]) == "did you mean A100-40G? known: A100-40G, V100"


def test_a_value_that_aliases_make_exponentially_large_is_shown_short() -> None:
    value: list[Any] = ["x"]
    for _ in range(60):
        value = [value] * 9
    assert len(shown(value)) < 1000
