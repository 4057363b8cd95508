"""Bounds against the exact estimate: never above it in time, equal in memory, tight where there is one stage."""

from __future__ import annotations

import random

import pytest
from searching import search_of

from paddle_rbt_plugin.search.layer_costs import copied_parameters
from paddle_rbt_plugin.search.space import candidates

CLUSTERS = ["1x4:A100-80G", "2x4:V100-32G", "3x2:H100", "1x4:A100-80G+1x4:V100-32G"]


def sampled(search, count=60):
    found, _ = candidates(search.analysis, search.cluster, search.training, search.space)
    return random.Random(0).sample(found, min(count, len(found)))


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("wide", [False, True])
def test_no_candidate_is_faster_than_its_bound_and_memory_is_that_of_its_tightest_stage(cluster, wide) -> None:
    search = search_of(cluster, layers=6, wide=wide, schedule="auto", order="auto")
    for candidate in sampled(search):
        assert_bounded(search, candidate)


def assert_bounded(search, candidate) -> None:
    bound = search.bound(candidate)
    exact = search.evaluate(candidate).estimate
    assert bound.step_time_s <= exact.step_time_s, candidate
    tightest = max(exact.stages, key=lambda s: s.peak_memory_bytes - s.memory_limit_bytes)
    assert bound.peak_memory_bytes == tightest.peak_memory_bytes, candidate
    assert bound.memory_limit_bytes == tightest.memory_limit_bytes
    assert (bound.missing_bytes <= 0) == exact.fits


@pytest.mark.parametrize("frozen_embedding", [False, True])
def test_the_copy_of_a_tied_head_is_trained_where_the_embedding_is(frozen_embedding) -> None:
    search = search_of("1x4:A100-80G", wide=True, pp=2, vpp=1, own_copies=True, frozen_embedding=frozen_embedding)
    for candidate in sampled(search, 20):
        assert_bounded(search, candidate)
    completion = search.completion(candidate)
    copies, trained = copied_parameters(completion).sum(1)
    assert copies > 0
    assert trained == (0 if frozen_embedding else copies)


def test_the_bound_of_one_stage_is_its_step() -> None:
    search = search_of("1x4:A100-80G", pp=1)
    for candidate in sampled(search, 30):
        bound = search.bound(candidate)
        assert bound.step_time_s == pytest.approx(search.evaluate(candidate).estimate.step_time_s)


def test_a_shared_memo_changes_no_estimate() -> None:
    from paddle_rbt_plugin.cost.estimates import estimate

    search = search_of("2x4:A100-80G", wide=True, schedule="auto", order="auto")
    for candidate in sampled(search, 40):
        alone = estimate(search.completion(candidate), candidate, search.cluster, search.training)
        assert search.evaluate(candidate).estimate == alone


def test_memory_never_shrinks_with_the_micro_batch() -> None:
    search = search_of("2x4:A100-80G", layers=6, wide=True)
    found, _ = candidates(search.analysis, search.cluster, search.training, search.space)
    needs: dict[tuple, float] = {}
    for candidate in found:  # by growing micro batch
        bound = search.bound(candidate)
        kind = (
            candidate.pp, candidate.dp, candidate.mp, candidate.recompute, candidate.sharding_stage, candidate.sharding_degree,
            candidate.sequence_parallel, candidate.schedule, candidate.vpp,
        )  # fmt: skip
        assert bound.peak_memory_bytes >= needs.get(kind, 0.0) * (1 - 1e-9), candidate
        needs[kind] = bound.peak_memory_bytes
