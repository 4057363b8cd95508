"""Levels o2 and o3 against trying everything on small cases; a level is never worse than the one below."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import search_of

from paddle_rbt_plugin.cluster import Cluster, parse_cluster
from paddle_rbt_plugin.errors import NoFeasiblePlan
from paddle_rbt_plugin.search import o2
from paddle_rbt_plugin.search.levels import run_level
from paddle_rbt_plugin.search.state import Deadline

HETERO = "1x2:A100-80G+1x2:V100-16G"


def brute_force(search, setting):
    """The least T over all cuts and all strategies of all layers, from the definition; None where nothing fits."""
    layers, pp = search.analysis.layers.count, setting.candidate.pp
    m = setting.candidate.accumulate_steps
    stages = [o2._stage_runs(search, setting, s) for s in range(pp)]
    best = None
    for cuts in combinations(range(1, layers), pp - 1):
        edges = [0, *cuts, layers]
        for chosen in product(range(len(setting.options)), repeat=layers):
            times = [run_seconds(stages[s], edges[s], chosen[edges[s] : edges[s + 1]]) for s in range(pp)]
            if None not in times:
                total = sum(times) + (m - 1) * max(times)
                best = total if best is None else min(best, total)
    return best


def run_seconds(stage, start, chosen):
    rows = np.array([stage.costs.layers[o, start + i] for i, o in enumerate(chosen)])
    if rows[:, 1].sum() + rows[:, 2:].max(0).sum() > stage.limit:
        return None
    moves = sum(stage.costs.reshard[a, b] for a, b in pairwise(chosen))
    return rows[:, 0].sum() + moves + stage.costs.sends[chosen[-1]]


def some_settings(search, most_options=4):
    """Settings with few enough options to try everything."""
    found = [s for s in o2._settings(search) if len(s.options) > 1]
    return [replace(s, options=s.options[:: max(1, len(s.options) // most_options)][:most_options]) for s in found]


@pytest.mark.parametrize(
    ("cluster", "layers", "wide", "reserve"),
    [("1x4:A100-80G", 4, False, 0.1), ("1x4:V100-16G", 4, True, 0.1), ("1x4:V100-16G", 5, True, 0.35), (HETERO, 4, True, 0.3)],
)
def test_the_dynamic_programme_finds_what_trying_everything_finds(cluster, layers, wide, reserve) -> None:
    search = search_of(cluster, layers=layers, wide=wide, micro_batch=[1, 2], sharding_stage=[0, 1], batch=8)
    search.memory_reserve = reserve
    seen = set()
    for setting in some_settings(search)[::3]:
        expected = brute_force(search, setting)
        found = o2.best_cut(search, setting)
        seen.add(found is None)
        assert (found is None) == (expected is None)
        if found is not None:
            assert found.seconds == pytest.approx(expected)
            assert o2.best_cut(search, setting, below=found.seconds * 1.001).seconds == pytest.approx(expected)
    assert False in seen


@lru_cache
def searched(cluster, wide, overlap):
    space = {"schedule": "auto", "micro_batch": [1, 2, 4], "overlap_gradients": overlap}
    search = search_of(cluster, layers=6, wide=wide, batch=16, **space)
    return search, [(setting, o2._least(search, setting)) for setting in o2._settings(search)]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_cut_and_no_strategies_are_estimated_below_the_bound_of_their_setting(data) -> None:
    clusters = ["1x4:A100-80G", "3x2:H100", HETERO, "1x2:V100-16G+2x1:H100"]
    search, found = searched(data.draw(st.sampled_from(clusters)), data.draw(st.booleans()), data.draw(st.booleans()))
    setting, least = data.draw(st.sampled_from(found))
    layers, pp = search.analysis.layers.count, setting.candidate.pp
    cuts = data.draw(st.sets(st.integers(1, layers - 1), min_size=pp - 1, max_size=pp - 1))
    options = st.integers(0, len(setting.options) - 1)
    chosen = data.draw(options.map(lambda i: [i] * layers) | st.lists(options, min_size=layers, max_size=layers))
    cut = o2.Cut(0.0, tuple(np.diff([0, *sorted(cuts), layers]).tolist()), tuple(chosen))
    assert least <= o2._evaluate(search, setting, cut).estimate.step_time_s * (1 + 1e-9)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8), st.integers(1, 64))
def test_the_weights_of_that_bound_are_those_of_a_mean(times, steps) -> None:
    weights = o2._mixed(1 / np.array(times), steps)
    before = np.cumsum(times) - times
    assert weights @ times <= (before + steps * np.array(times)).max() * (1 + 1e-9)
    assert o2._mixed(np.ones(len(times)), steps) == pytest.approx(1 / (1 - (1 - 1 / steps) ** len(times)))


def test_the_objective_is_close_to_the_estimate() -> None:
    search = search_of("1x4:A100-80G", layers=8, wide=True, micro_batch=[1, 2], batch=32)
    for setting in list(o2._settings(search))[::5]:
        found = o2.best_cut(search, setting)
        if found is not None:
            cost = o2._evaluate(search, setting, found).estimate
            assert cost.step_time_s == pytest.approx(found.seconds, rel=0.1)


def seconds_of(level, *args, **kwargs):
    try:
        return run_level(search_of(*args, **kwargs), level).best.estimate.step_time_s
    except NoFeasiblePlan:
        return float("inf")


@settings(max_examples=12, deadline=None)
@given(
    cluster=st.sampled_from(["1x2:V100-16G", "1x4:A100-80G", "1x3:H100", HETERO, "1x1:V100-16G+1x3:A100-80G"]),
    layers=st.integers(1, 6),
    wide=st.booleans(),
    recompute=st.sampled_from(["auto", "none"]),
    schedule=st.sampled_from(["1F1B", "FThenB"]),
)
def test_no_level_is_worse_than_the_one_below(cluster, layers, wide, recompute, schedule) -> None:
    space = {"layers": layers, "wide": wide, "batch": 12, "recompute": recompute, "schedule": schedule, "micro_batch": [1, 2]}
    times = [seconds_of(level, cluster, **space) for level in ("o1", "o2", "o3")]
    assert times[2] <= times[1] <= times[0]


def test_partial_recomputation_beats_recomputing_everything_where_memory_is_short() -> None:
    space = {"layers": 6, "wide": True, "batch": 8, "pp": 1, "mp": 2, "sequence_parallel": False, "micro_batch": 4}
    roomy = run_level(search_of("1x2:V100-32G", **space), "o1").best
    assert roomy.candidate.recompute == "none"

    def short(level):
        search = search_of("1x2:V100-32G", **space)
        search.memory_reserve = 1 - 0.93 * roomy.estimate.peak_memory_bytes / (32 * 2**30)
        return run_level(search, level).best

    one, layerwise = short("o1"), short("o2")
    assert one.candidate.recompute != "none"
    assert roomy.estimate.step_time_s < layerwise.estimate.step_time_s < one.estimate.step_time_s
    assert len({s.recompute for s in layerwise.layers}) > 1
    assert layerwise.estimate.fits


def test_a_faster_group_gets_more_layers_in_either_order() -> None:
    fast, slow = parse_cluster("1x4:A100-80G").groups[0], parse_cluster("1x4:V100-32G").groups[0]
    for groups in ((fast, slow), (slow, fast)):
        search = search_of(Cluster(groups), layers=12, wide=True, batch=32, pp=2)
        best = run_level(search, "o2").best
        first, second = best.stage_layers
        assert (first > second) == (groups[0] is fast)


def test_level_o3_puts_groups_in_the_better_order_and_says_which_ranks_they_are() -> None:
    results = {}
    for cluster in ("1x4:A100-80G+1x4:V100-32G", "1x4:V100-32G+1x4:A100-80G"):
        results[cluster] = run_level(search_of(cluster, layers=8, wide=True, batch=32, micro_batch=[1, 2]), "o3")
    one, other = results.values()
    assert one.best.estimate.step_time_s == pytest.approx(other.best.estimate.step_time_s)
    assert (one.ranks is None) != (other.ranks is None) or one.best.candidate.pp == 1
    for result in results.values():
        assert result.ranks is None or result.ranks == (4, 5, 6, 7, 0, 1, 2, 3)


@pytest.mark.parametrize("cluster", ["1x4:A100-80G", "2x2:H100"])
def test_level_o3_of_equal_machines_is_level_o2(cluster) -> None:
    space = {"layers": 4, "batch": 8, "micro_batch": [1, 2]}
    assert run_level(search_of(cluster, **space), "o3") == run_level(search_of(cluster, **space), "o2")


def test_infeasible_stays_infeasible() -> None:
    for level in ("o1", "o2", "o3"):
        with pytest.raises(NoFeasiblePlan, match="no plan fits the memory"):
            run_level(search_of("1x2:V100-16G", layers=12, wide=True), level)


def test_level_o3_that_runs_out_of_time_keeps_the_other_notes() -> None:
    search = search_of(HETERO, mode="eval", recompute="full")
    search.deadline = Deadline(0.0)
    notes = run_level(search, "o3").notes
    assert sorted(note.kind for note in notes) == ["ignored", "stopped"]


def test_a_host_that_launches_in_no_time_bounds_no_setting() -> None:
    software = {"host_launch_s": 0}
    cluster = parse_cluster({"machines": 1, "devices_per_machine": 4, "device": "A100-80G", "software": software})
    search = search_of(cluster, wide=True)
    with np.errstate(divide="raise", invalid="raise"):
        best = run_level(search, "o2").best.estimate.step_time_s
    assert best <= run_level(search_of(cluster, wide=True), "o1").best.estimate.step_time_s
