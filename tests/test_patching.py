"""Changes to Paddle are made once, for the versions that they are for, and taken back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import paddle
import pytest

from paddle_rbt_plugin.patching import Attribute, Flag, Item, Listed, Setting, installed_version, paddle_change

FLAG = "FLAGS_check_nan_inf"


class Base:
    here = "inherited"


class Owner(Base):
    own = "own"


def test_every_kind_of_setting_is_taken_back() -> None:
    table, entries = {"known": 1}, [1]
    before = paddle.get_flags(FLAG)[FLAG]

    @paddle_change(">=2.6")
    def change() -> Iterator[Setting]:
        yield Attribute(Owner, "own", "changed")
        yield Attribute(Owner, "here", "changed")
        yield Attribute(Owner, "new", "changed")
        yield Item(table, "known", 2)
        yield Item(table, "new", 2)
        yield Listed(entries, 2)
        yield Flag(FLAG, not before)

    with change.apply():
        assert (Owner.own, Owner.here, Owner.new) == ("changed",) * 3
        assert table == {"known": 2, "new": 2} and entries == [1, 2]
        assert paddle.get_flags(FLAG)[FLAG] is not before
    assert Owner.own == "own" and "here" not in vars(Owner) and not hasattr(Owner, "new")
    assert table == {"known": 1} and entries == [1]
    assert paddle.get_flags(FLAG)[FLAG] is before


def test_a_change_that_fails_half_way_leaves_nothing_behind() -> None:
    @paddle_change(">=2.6")
    def change() -> Iterator[Setting]:
        yield Attribute(Owner, "own", "changed")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), change.apply():
        pass
    assert Owner.own == "own" and not change.is_made


@pytest.mark.parametrize(
    "how", [{"versions": "<2"}, {"versions": ">=2.6", "lacking": lambda: False}], ids=["old", "not lacking"]
)
def test_a_change_that_is_not_needed_is_not_made(how: dict[str, Any]) -> None:
    @paddle_change(**how)
    def change() -> Iterator[Setting]:
        yield Attribute(Owner, "own", "changed")

    with change.apply():
        assert Owner.own == "own" and not change.is_needed()


def test_an_installed_change_is_made_once_left_out_for_a_while_and_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Owner, "own", 0)

    @paddle_change(">=2.6", permanent="this test says so")
    def change() -> Iterator[Setting]:
        yield Attribute(Owner, "own", Owner.own + 1)

    change.install()
    change.install()
    with change.apply():
        assert Owner.own == 1
    with change.left_out():
        assert Owner.own == 0
        with change.apply():
            assert Owner.own == 0
    assert Owner.own == 1 and change.is_made


def test_scopes_on_objects_of_their_own_nest(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Owner(), Owner()

    @paddle_change(">=2.6")
    def change(owner: Any) -> Iterator[Setting]:
        yield Attribute(owner, "__class__", Base)

    with change.apply(first), change.apply(second):
        assert type(first) is type(second) is Base
    assert type(first) is type(second) is Owner


def test_a_build_of_the_development_branch_counts_as_the_newest_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddle, "__version__", "0.0.0")
    assert str(installed_version()) == "3.3.1"
