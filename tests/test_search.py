"""Level o1: the best of all candidates, the same every time, and reasons where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
from searching import search_of

from paddle_rbt_plugin.errors import NoFeasiblePlan
from paddle_rbt_plugin.search import Progress, candidate_dict
from paddle_rbt_plugin.search.levels import run_level
from paddle_rbt_plugin.search.o1 import KEPT, run_o1
from paddle_rbt_plugin.search.progress import Reporter
from paddle_rbt_plugin.search.result import Misses, ranked
from paddle_rbt_plugin.search.space import candidates
from paddle_rbt_plugin.search.state import Deadline


def exhaustive(search):
    """Every candidate that fits, each with its exact cost, best first."""
    found, _ = candidates(search.analysis, search.cluster, search.training, search.space)
    everything = [search.evaluate(c) for c in found if not search.analysis.lost_sharding(search.completion(c))]
    return ranked((e for e in everything if e.estimate.fits), search.resolution)


@pytest.mark.parametrize(("cluster", "wide"), [("1x4:A100-80G", False), ("2x2:V100-16G", True), ("3x2:H100", False)])
def test_pruning_loses_none_of_the_best(cluster, wide) -> None:
    search = search_of(cluster, layers=6, wide=wide, micro_batch=[1, 2, 4])
    result = run_o1(search)
    expected = exhaustive(search)
    assert result.best == expected[0]
    assert result.feasible[:KEPT] == tuple(expected[:KEPT])
    best_of_each = {}
    for e in expected:
        best_of_each.setdefault((e.candidate.pp, e.candidate.dp, e.candidate.mp), e)
    assert all(e in result.feasible for e in best_of_each.values())


def test_of_equally_fast_candidates_the_simplest_wins_and_the_fastest_of_the_equally_simple() -> None:
    search = search_of("1x4:A100-80G", micro_batch=[1, 2])
    some = run_o1(search).best

    def timed(seconds, candidate=some.candidate, **others):
        estimate = replace(some.estimate, step_time_s=seconds)
        return replace(some, candidate=replace(candidate, sharding_stage=0, **others), estimate=estimate)

    plain, parallel = timed(1.0, micro_batch=2), timed(0.995, sequence_parallel=True)
    more_zero = replace(parallel, candidate=replace(plain.candidate, sharding_stage=3))
    layerwise = replace(timed(0.993), layers=())
    alike = [parallel, more_zero, layerwise, plain]
    assert ranked(alike, 0.01) == [plain, layerwise, *sorted((parallel, more_zero), key=lambda e: e.rank)]
    assert ranked(alike, 0.0)[0] == layerwise
    assert ranked([*alike, timed(0.98, pp=4)], 0.01)[0].candidate.pp == 4
    assert ranked([*alike, timed(0.999, micro_batch=1)], 0.01)[0].candidate.micro_batch == 1
    assert ranked([], 0.01) == []


def test_the_winner_is_the_simplest_of_all_that_fit_within_the_resolution() -> None:
    search = search_of("2x4:A100-80G", layers=4, micro_batch=[1, 2, 3])
    result, everything = run_o1(search), exhaustive(search)
    fastest = min(e.estimate.step_time_s for e in everything)
    alike = [e for e in everything if e.estimate.step_time_s <= fastest * (1 + search.resolution)]
    assert result.best in alike and result.best.complexity == min(e.complexity for e in alike)
    assert [e.rank for e in result.feasible[1:]] == sorted(e.rank for e in result.feasible[1:])


def test_every_candidate_that_does_not_fit_is_counted_under_its_degrees() -> None:
    search = search_of("2x2:V100-16G", layers=6, wide=True)
    result = run_o1(search)
    found, _ = candidates(search.analysis, search.cluster, search.training, search.space)
    assert result.considered == len(found)
    assert all(r.missing_bytes > 0 and r.count > 0 for r in result.rejected if r.reason.kind == "memory")
    fitting = sum(search.bound(c).missing_bytes <= 0 for c in found)
    assert fitting + sum(r.count for r in result.rejected) == len(found)
    assert len(result.rejected) < 40


def test_a_small_miss_is_told_in_a_unit_that_shows_it() -> None:
    search = search_of("1x2:V100-16G")
    candidate = candidates(search.analysis, search.cluster, search.training, search.space)[0][0]
    bound = search.bound(candidate)
    misses = Misses()
    misses.add(candidate, replace(bound, peak_memory_bytes=bound.memory_limit_bytes + 3 * 2**20))
    assert (
        str(misses.rejected()[0].reason) == "needs 14.4 GiB, 3.00 MiB more than the 14.4 GiB that V100-16G has less its reserve"
    )


ODD = [*(f"1x{n}:A100-80G" for n in (1, 2, 3, 5, 6, 7, 8)), "2x6:A100-80G", "3x8:A100-80G", "5x8:A100-80G", "1x13:A100-80G"]


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("cluster", ODD)
def test_odd_clusters_have_a_plan_or_say_what_stands_in_its_way(cluster, layers) -> None:
    search = search_of(cluster, layers=layers, batch=24)
    try:
        result = run_o1(search)
    except NoFeasiblePlan as error:
        assert "dp" in str(error) and "does not divide" in str(error)
        return
    c = result.best.candidate
    assert c.pp * c.dp * c.mp == search.cluster.device_count
    assert c.pp <= layers
    assert result.best.estimate.fits


def test_more_devices_than_anything_divides_names_what_divides() -> None:
    with pytest.raises(NoFeasiblePlan, match=r"no way to use the 77 devices .*legal: 1, 2, 4, 8"):
        run_o1(search_of("11x7:A100-80G", layers=1))


def test_a_model_that_does_not_fit_names_the_nearest_candidate_and_what_it_lacks() -> None:
    with pytest.raises(NoFeasiblePlan, match=r"nearest candidate, pp . x dp . x mp .*needs .* GiB, .* more than the 14.4 GiB"):
        run_o1(search_of("1x2:V100-16G", layers=12, wide=True))
    with pytest.raises(NoFeasiblePlan, match=r"1x4:V100-16G is enough\), or leave recompute out of search_space$"):
        run_o1(search_of("1x2:V100-16G", layers=12, wide=True, recompute="none"))
    with pytest.raises(NoFeasiblePlan, match=r"use more or larger devices \(1x4:V100-16G is enough\)$"):
        run_o1(search_of("1x2:V100-16G", layers=12, wide=True))


def test_the_time_limit_gives_the_best_so_far_and_says_so() -> None:
    search = search_of("2x4:A100-80G", layers=8)
    search.deadline = Deadline(0.0)
    result = run_o1(search)
    assert result.best.estimate.fits
    assert (result.notes[0].kind, result.notes[0].figures["limit_s"]) == ("stopped", 0.0)
    assert "stopped by the time limit of 0 s: not" in str(result.notes[0])


def test_ties_and_hash_seeds_do_not_change_the_plan() -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from searching import search_of\n"
        "from paddle_rbt_plugin.search.o1 import run_o1\n"
        "result = run_o1(search_of('1x6:A100-80G', layers=4, order='auto', schedule='auto'))\n"
        "print(result.best, [e.candidate for e in result.feasible], result.rejected)\n"
    )
    outputs = set()
    for seed in ("0", "1", "4242"):
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, os.path.dirname(__file__)],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed},
        )  # fmt: skip
        outputs.add(run.stdout)
    assert len(outputs) == 1 and outputs != {""}


@pytest.mark.parametrize(("recompute", "zero"), list(product(["none", "full"], [0, 3])))
def test_what_the_user_fixes_is_kept(recompute, zero) -> None:
    result = run_o1(search_of("1x4:A100-80G", recompute=recompute, sharding_stage=zero, dp=[2, 4]))
    assert {(e.candidate.recompute, e.candidate.sharding_stage) for e in result.feasible} == {(recompute, zero)}


@pytest.mark.parametrize("level", ["o1", "o2"])
def test_evaluation_is_planned_with_the_settings_of_training_and_says_which_it_ignores(level) -> None:
    search = search_of("1x4:A100-80G", mode="eval", sharding_stage=2, sharding_degree=2, recompute="full")
    result = run_level(search, level)
    assert {(e.candidate.sharding_stage, e.candidate.recompute) for e in result.feasible} == {(0, "none")}
    assert tuple(map(str, result.notes)) == (
        "ignored: recompute full of search_space, sharding_degree 2 of search_space, sharding_stage 2 of search_space; "
        "evaluation keeps nothing for backward and has no optimizer states to split",
    )


@pytest.mark.parametrize("level", ["o1", "o2"])
def test_a_watcher_is_told_what_is_tried_and_the_best_so_far(level) -> None:
    told: list[Progress] = []
    search = search_of("2x2:A100-80G", layers=4, micro_batch=[1, 2])
    search.progress = Reporter(told.append)
    result = run_level(search, level)
    assert all(0 <= p.done <= p.total for p in told)
    assert {(p.trying["pp"], p.trying["dp"], p.trying["mp"]) for p in told if "dp" in p.trying} >= {(1, 4, 1), (2, 1, 2)}
    estimated = [p.step_time_s for p in told if p.is_estimated]
    assert estimated == sorted(estimated, reverse=True)
    assert told[0].best == {} and told[0].step_time_s is None
    assert (told[-1].done, told[-1].trying) == (told[-1].total, {})
    assert (told[-1].best, told[-1].step_time_s) == (candidate_dict(result.best.candidate), result.best.estimate.step_time_s)
    assert any(p.step_time_s is not None and not p.is_estimated for p in told)
