"""What is said of devices that are too few, and of batches that cannot be divided among them."""

from __future__ import annotations

import pytest
from searching import search_of

from paddle_rbt_plugin.errors import NoFeasiblePlan
from paddle_rbt_plugin.search.o1 import run_o1


def enough(cluster: str, **space: object) -> str:
    """The cluster that is named where nothing fits."""
    with pytest.raises(NoFeasiblePlan, match="use more or larger devices") as raised:
        run_o1(search_of(cluster, layers=12, wide=True, **space))
    named = str(raised.value).rpartition("larger devices (")[2]
    return named.partition(" is enough")[0] if " is enough" in named else ""


def test_the_cluster_that_is_named_is_enough_and_half_of_it_is_not() -> None:
    assert enough("1x1:V100-16G") == enough("1x2:V100-16G") == "1x4:V100-16G"
    assert run_o1(search_of("1x4:V100-16G", layers=12, wide=True)).best.estimate.fits


def test_where_the_search_space_uses_no_more_devices_none_are_named() -> None:
    assert enough("1x1:V100-16G", pp=1, dp=1, mp=1) == ""


def notes(cluster: str, batch: int, **space: object) -> list[str]:
    result = run_o1(search_of(cluster, layers=4, batch=batch, wide=True, **space))
    return [str(note) for note in result.notes if note.kind == "other_batch"]


def test_a_batch_that_replicas_cannot_share_is_answered_with_one_that_they_can() -> None:
    (note,) = notes("1x3:A100-80G", 8)
    assert "3 replicas cannot share the global batch of 8; with 9, " in note


def test_the_other_batch_is_as_fast_as_its_own_plan() -> None:
    result = run_o1(search_of("1x3:A100-80G", layers=4, batch=8, wide=True))
    (note,) = [note for note in result.notes if note.kind == "other_batch"]
    planned = run_o1(search_of("1x3:A100-80G", layers=4, batch=9, wide=True)).best
    assert planned.candidate.dp == 3
    assert note.figures["then_s"] * 9 == pytest.approx(planned.estimate.step_time_s, rel=0.02)


@pytest.mark.parametrize(("cluster", "batch", "space"), [("1x4:A100-80G", 8, {}), ("1x3:A100-80G", 8, {"pp": 3})])
def test_nothing_is_said_where_replicas_share_the_batch_or_are_not_asked_for(cluster, batch, space) -> None:
    assert notes(cluster, batch, **space) == []
