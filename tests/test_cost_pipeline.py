"""Pipeline schedules."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paddle.distributed.passes.pipeline_scheduler_pass.pipeline_vpp import PipelineVirtualPipelinePass

from paddle_rbt_plugin.cost.pipeline import _simulate, in_flight, makespan, stage_order

STAGES = st.integers(1, 6)
MICRO_BATCHES = st.integers(1, 40)
SECONDS = st.floats(0.1, 4.0)


def uniform(stages: int, chunks: int, seconds: float) -> tuple[tuple[float, ...], ...]:
    return ((seconds / chunks,) * chunks,) * stages


@given(STAGES, MICRO_BATCHES, SECONDS, SECONDS, st.sampled_from(["FThenB", "1F1B"]))
def test_equal_stages_take_m_plus_p_minus_1_slots(p: int, m: int, f: float, b: float, schedule: str) -> None:
    seconds = makespan(schedule, uniform(p, 1, f), uniform(p, 1, b), m)  # type: ignore[arg-type]
    assert seconds == pytest.approx((m + p - 1) * (f + b))


@given(st.integers(2, 5), st.integers(1, 6), st.integers(2, 4), SECONDS, SECONDS)
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, groups: int, v: int, f: float, b: float) -> None:
    m = groups * p
    seconds = makespan("VPP", uniform(p, v, f), uniform(p, v, b), m)
    assert seconds == pytest.approx((m + (p - 1) / v) * (f + b))


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=6), MICRO_BATCHES, st.sampled_from(["FThenB", "1F1B"]))
def test_unequal_stages_take_at_least_the_busiest_and_at_most_one_after_the_other(
    times: list[tuple[float, float]], m: int, schedule: str
) -> None:
    forward, backward = tuple((f,) for f, _ in times), tuple((b,) for _, b in times)
    seconds = makespan(schedule, forward, backward, m)  # type: ignore[arg-type]
    busiest = max(f + b for f, b in times)
    passing_through = sum(f + b for f, b in times)
    assert seconds >= m * busiest - 1e-9
    assert seconds >= passing_through - 1e-9
    assert seconds <= m * passing_through + 1e-9


@given(
    st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=5),
    st.integers(30, 60),
    st.sampled_from([("1F1B", 1), ("VPP", 2), ("VPP", 3)]),
)
def test_adding_rounds_of_the_steady_state_is_close_to_simulating_all(
    times: list[tuple[float, float]], m: int, kind: tuple[str, int]
) -> None:
    schedule, chunks = kind
    m -= m % len(times)
    forward = tuple((f / chunks,) * chunks for f, _ in times)
    backward = tuple((b / chunks,) * chunks for _, b in times)
    exact = _simulate(schedule, forward, backward, m)  # type: ignore[arg-type]
    assert makespan(schedule, forward, backward, m) == pytest.approx(exact, rel=0.02)  # type: ignore[arg-type]


@given(st.sampled_from(["FThenB", "1F1B", "VPP"]), STAGES, MICRO_BATCHES, st.integers(2, 3))
def test_every_stage_runs_every_pass_once_and_backward_after_forward(schedule: str, p: int, m: int, v: int) -> None:
    chunks = v if schedule == "VPP" else 1
    for stage in range(p):
        order = stage_order(schedule, stage, p, m, chunks)  # type: ignore[arg-type]
        assert len(order) == len(set(order)) == 2 * m * chunks
        place = {what: i for i, what in enumerate(order)}
        assert all(place[i, c, False] < place[i, c, True] for i in range(m) for c in range(chunks))


@pytest.mark.skipif(not hasattr(PipelineVirtualPipelinePass, "RECV_FORWARD"), reason="Paddle 3.0 orders its jobs otherwise")
@given(st.integers(2, 5), st.integers(1, 4), st.integers(2, 4))
def test_interleaved_passes_are_in_the_order_of_paddles_jobs(p: int, groups: int, v: int) -> None:
    settings = {"num_micro_batches": groups * p, "pp_degree": p, "vpp_degree": v}
    for stage in range(p):
        schedule = PipelineVirtualPipelinePass()
        for name, value in (settings | {"pp_stage": stage}).items():
            schedule.set_attr(name, value)
        jobs = [(job.type(), job.micro_batch_id()) for job in schedule._create_job_list()]
        passes = [job for job in jobs if job[0].startswith(("forward", "backward"))]
        ours = stage_order("VPP", stage, p, groups * p, v)
        assert passes == [(f"{'backward' if back else 'forward'}{chunk}", i) for i, chunk, back in ours]


@given(st.sampled_from(["FThenB", "1F1B", "VPP"]), st.integers(2, 6), st.integers(1, 8))
def test_micro_batches_in_flight_are_those_of_the_order(schedule: str, p: int, groups: int) -> None:
    m, chunks = groups * p, 2 if schedule == "VPP" else 1
    for stage in range(p):
        held = most = 0
        for _, _, is_backward in stage_order(schedule, stage, p, m, chunks):  # type: ignore[arg-type]
            held += -1 if is_backward else 1
            most = max(most, held)
        assert in_flight(schedule, stage, p, m, chunks) == most / chunks  # type: ignore[arg-type]


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=4), st.integers(1, 3), st.integers(1, 3))
def test_a_pass_starts_when_its_stage_is_free_and_the_pass_that_it_needs_has_ended(
    times: list[tuple[float, float]], groups: int, v: int
) -> None:
    p, m = len(times), groups * len(times)
    schedule = "VPP" if v > 1 else "1F1B"
    forward, backward = (tuple(tuple(t[side] * (c + 1) for c in range(v)) for t in times) for side in (0, 1))
    orders = [stage_order(schedule, s, p, m, v) for s in range(p)]  # type: ignore[arg-type]

    @cache
    def end(s: int, at: int) -> float:
        i, c, back = orders[s][at]
        here = c * p + s
        needed = (i, here + 1, True) if back and here < v * p - 1 else (i, here, False) if back else (i, here - 1, False)
        starts = [end(s, at - 1)] if at else [0.0]
        if needed[1] >= 0:
            stage, chunk = needed[1] % p, needed[1] // p
            starts.append(end(stage, orders[stage].index((i, chunk, needed[2]))))
        return max(starts) + (backward if back else forward)[s][c]

    assert _simulate(schedule, forward, backward, m) == max(end(s, 2 * m * v - 1) for s in range(p))  # type: ignore[arg-type]
