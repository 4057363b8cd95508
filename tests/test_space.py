"""The space of candidates: nothing is left out without a reason."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import search_of

from paddle_rbt_plugin.cluster import factorisations
from paddle_rbt_plugin.errors import NoFeasiblePlan, TunerError
from paddle_rbt_plugin.search import SearchSpace
from paddle_rbt_plugin.search.space import candidates, ways


def triples(n: int) -> set[tuple[int, int, int]]:
    return {(p, d, n // p // d) for p in range(1, n + 1) if n % p == 0 for d in range(1, n + 1) if n // p % d == 0}


def enumerate_all(search):
    return candidates(search.analysis, search.cluster, search.training, search.space)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 64, 128])
@pytest.mark.parametrize("layers", [1, 3, 4])
def test_every_factorisation_is_a_candidate_or_rejected_with_a_reason(devices, layers) -> None:
    search = search_of(f"1x{devices}:A100-80G" if devices <= 8 else f"{devices // 4}x4:A100-80G", layers=layers)
    found, rejected = enumerate_all(search)
    tried = {(c.pp, c.dp, c.mp) for c in found}
    out = {(r.candidate["pp"], r.candidate["dp"], r.candidate["mp"]) for r in rejected}
    assert tried | out == triples(devices) == set(factorisations(devices))
    assert not tried & out
    assert len(out) == len(rejected) and all(r.reason for r in rejected)


def test_a_candidate_uses_the_whole_batch_and_every_device() -> None:
    found, _ = enumerate_all(search_of("2x4:A100-80G", layers=4, schedule="auto", order="auto"))
    for c in found:
        assert c.pp * c.dp * c.mp == 8
        assert c.micro_batch * c.accumulate_steps * c.dp == 24
        assert c.pp * c.vpp <= 4
    assert len(set(found)) == len(found)


def test_every_share_of_the_batch_may_be_a_micro_batch() -> None:
    search = search_of("1x1:A100-80G", batch=4096)
    found, _ = enumerate_all(search)
    assert {c.micro_batch for c in found} == {2**n for n in range(13)}


def test_left_alone_everything_that_can_win_is_searched() -> None:
    found, _ = enumerate_all(search_of("2x4:A100-80G", layers=8))
    assert {c.recompute for c in found} == {"none", "selective", "full"}
    assert {c.sharding_stage for c in found} == {0, 1, 2, 3}
    assert {c.sequence_parallel for c in found} == {False, True}
    assert {(c.sharding_stage, c.sharding_degree) for c in found if (c.dp, c.mp) == (8, 1)} == {
        (0, "whole"), (1, "whole"), (2, "whole"), (2, 4), (3, "whole"), (3, 4)
    }  # fmt: skip
    assert {c.schedule for c in found} == {"1F1B", "VPP"}
    assert {c.vpp for c in found} >= {1, 2, 4}
    assert {c.axes for c in found} == {("dp", "mp")}


def test_auto_means_all_values() -> None:
    found, _ = enumerate_all(search_of("2x4:A100-80G", layers=8, schedule="auto", order="auto", recompute="auto"))
    assert {c.schedule for c in found} == {"FThenB", "1F1B", "VPP"}
    assert {c.axes for c in found} == {("dp", "mp"), ("mp", "dp")}
    assert {c.recompute for c in found} == {"none", "selective", "full"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pp", 2), ("dp", 4), ("mp", 2), ("micro_batch", 3), ("accumulate_steps", 6), ("recompute", "selective"),
        ("sharding_stage", 1), ("sharding_degree", 2), ("sequence_parallel", True), ("schedule", "FThenB"), ("vpp", 2),
        ("order", "mp_dp"),
    ],
)  # fmt: skip
def test_a_fixed_dimension_takes_no_other_value(key, value) -> None:
    found, _ = enumerate_all(search_of("2x4:A100-80G", **{"mp": [2], "dp": [2, 4], key: value}))
    assert found
    for c in found:
        if key == "order":
            assert "_".join(c.axes) == value or c.dp == 1 or c.mp == 1
        elif key in ("schedule", "vpp"):
            assert getattr(c, key) == value or c.pp == 1
        elif key == "sharding_stage":
            assert c.sharding_stage == value
        elif key == "sharding_degree":
            assert c.shards(c.dp) == value or not c.sharding_stage
        else:
            assert getattr(c, key) == value


def test_choices_without_effect_are_listed_once() -> None:
    found, _ = enumerate_all(search_of("1x4:A100-80G", pp=1, dp=[1, 4]))
    assert not any(c.sequence_parallel for c in found if c.mp == 1)
    assert not any(c.sharding_stage for c in found if c.dp == 1)
    assert {c.schedule for c in found} == {"1F1B"}


def test_values_that_no_dimension_takes_are_refused_with_the_right_ones() -> None:
    with pytest.raises(TunerError, match=r"micro_batches.*did you mean micro_batch"):
        SearchSpace.parse({"micro_batches": 2})
    with pytest.raises(TunerError, match="recompute must be one of none, selective, full"):
        SearchSpace.parse({"recompute": "some"})
    with pytest.raises(TunerError, match="at least 2, or 'whole'"):
        SearchSpace.parse({"sharding_degree": 1})
    with pytest.raises(TunerError, match="0, 1, 2 or 3"):
        SearchSpace.parse({"sharding_stage": 4})


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"mp": 3}, "mp 3 of search_space does not divide the 8 devices of 2x4:A100-80G; mp can be 1, 2, 4, 8"),
        ({"pp": [3, 5]}, r"pp \(3, 5\) of search_space do not divide the 8 devices .*pp can be 1, 2, 4, 8"),
        ({"pp": 4, "mp": 4}, "no product pp 4 x mp 4 of search_space divides the 8 devices"),
        ({"pp": 2, "mp": 2, "dp": [1, 4]}, r"no product pp 2 x dp \(1, 4\) x mp 2 of search_space is the 8 devices"),
    ],
)
def test_degrees_that_do_not_use_the_devices_are_answered_by_those_that_do(space, message) -> None:
    with pytest.raises(NoFeasiblePlan, match=message):
        enumerate_all(search_of("2x4:A100-80G", **space))


def test_a_degree_that_the_strategy_fixes_is_answered_with_its_name() -> None:
    search = search_of("2x4:A100-80G")
    search.space = search.space.restrict("strategy.pipeline", pp=(3,))
    with pytest.raises(NoFeasiblePlan, match=r"pp 3 of strategy.pipeline does not divide the 8 devices"):
        enumerate_all(search)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60))
def test_more_stages_than_layers_are_rejected_by_that_name(devices) -> None:
    search = search_of(f"{devices}x1:A100-80G", layers=3, batch=24, mp=1)
    found, rejected = ways(search.analysis, search.cluster, search.training, search.space)
    assert all(d.pp <= 3 for d in found)
    for r in rejected:
        if r.candidate["pp"] > 3 and r.candidate["mp"] == 1:
            assert (r.reason.kind, r.reason.figures["layers"]) == ("layers", 3)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"sharding_degree": 3}, "sharding_degree 3 of search_space; sharding_degree can be 2, 4 or whole"),
        ({"sharding_degree": 8, "dp": 4}, "sharding_degree 8 of search_space; sharding_degree can be 2, 4 or whole"),
        (
            {"sharding_degree": 2, "sharding_stage": 0},
            "sharding_degree 2 of search_space where sharding_stage is 0; sharding_stage would have to be 1, 2 or 3",
        ),
        ({"vpp": 7}, "vpp 7 of search_space; vpp can be 1 or 2"),
        ({"schedule": "VPP", "pp": 1}, "schedule VPP of search_space where pp is 1; pp would have to be 2"),
        ({"order": "mp_dp", "mp": 1}, "order mp_dp of search_space where mp is 1; mp would have to be 2"),
    ],
)
def test_a_value_that_no_candidate_has_is_answered_by_what_would_be_right(space, message) -> None:
    with pytest.raises(NoFeasiblePlan, match=f"no candidate has {message}"):
        enumerate_all(search_of("1x4:A100-80G", **space))


@pytest.mark.parametrize("space", [{"sharding_degree": [2, 3]}, {"vpp": [2, 7]}, {"schedule": "auto"}, {"pp": 1, "vpp": 1}])
def test_one_value_that_candidates_have_is_enough(space) -> None:
    assert enumerate_all(search_of("1x4:A100-80G", **space))[0]


@pytest.mark.parametrize(
    ("layers", "space", "reason"),
    [
        (4, {"dp": 4, "sharding_stage": 3, "sharding_degree": 3}, "sharding_degree 3 of search_space; .* 2, 4 or whole"),
        (2, {"pp": 2, "vpp": 2}, "vpp 2 of search_space; vpp can be 1"),
        (4, {"dp": 1, "sharding_stage": 2}, "sharding_stage 2 of search_space; sharding_stage can be 0"),
        (4, {"dp": 2, "micro_batch": 5}, "micro_batch 5 of search_space; micro_batch can be 1, 2, 3, 4, 6 or 12"),
    ],
)
def test_what_rules_out_a_way_to_use_the_devices_is_named(layers, space, reason) -> None:
    search = search_of("1x4:A100-80G", layers=layers, **space)
    found, rejected = ways(search.analysis, search.cluster, search.training, search.space)
    reasons = [
        str(r.reason) for r in rejected if all(r.candidate[k] == space.get(k, r.candidate[k]) for k in ("pp", "dp", "mp"))
    ]
    assert not found and reasons
    assert all(re.search(reason, r) for r in reasons), reasons


@pytest.mark.parametrize("fixed", [{"vpp": 2}, {"schedule": "VPP"}], ids=str)
def test_ways_of_one_stage_are_rejected_where_interleaving_is_asked_for(fixed) -> None:
    found, rejected = enumerate_all(search_of("1x4:A100-80G", **fixed))
    assert found and all(c.pp > 1 and c.vpp > 1 for c in found)
    assert any(r.candidate["pp"] == 1 and r.reason.kind == "interleaving" for r in rejected)
