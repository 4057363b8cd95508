"""Before the first step a process compares its own program with the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import launch_all

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.handover.engine.guard import _added_to_update, _comparable
from paddle_rbt_plugin.handover.pir.structure import Structure, compare


@pytest.mark.slow
def test_a_program_that_differs_from_the_plan_is_refused_unless_the_guard_is_off(tmp_path: Path) -> None:
    for rank, found in enumerate(launch_all("guard.py", 2, tmp_path / "out")):
        assert len(found["as planned"]) == 2
        assert found["otherwise"].startswith(f"rank {rank} would not execute the plan: backward ")
        assert "Nothing has been trained" in found["otherwise"] and "strategy.tuning.verify" in found["otherwise"]
        assert len(found["otherwise, unguarded"]) == 2


def structure(**collectives: int) -> Structure:
    return Structure({("optimizer", kind, "mp", 4096): n for kind, n in collectives.items()}, 100, local_shapes={"w": (4, 8)})


def test_what_an_update_lacks_is_a_difference_and_what_it_adds_is_not() -> None:
    planned, more = structure(all_reduce=1), structure(all_reduce=1, all_gather=2)
    assert compare(*_comparable(more, planned, False, False)) and not compare(*_comparable(planned, more, False, False))
    assert _added_to_update(planned, more) == ["all_gather along mp of 4096 bytes"]


def test_in_mixed_precision_shapes_are_compared() -> None:
    other = Structure({}, 100, local_shapes={"w": (8, 8)})
    (line,) = compare(*_comparable(structure(all_reduce=1), other, True, False))
    assert "parameter w" in line


def test_the_guard_is_a_setting() -> None:
    assert Settings().verify
    with pytest.raises(rbt.TunerError, match="verify must be True or False"):
        Settings(verify="no")  # type: ignore[arg-type]
