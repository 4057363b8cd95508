"""Pipeline schedules, simulated.

A step runs ``m`` micro batches through ``p`` stages of ``v`` chunks. Every stage executes its forward and backward passes in a
fixed order; a pass starts when the stage is free and its neighbour has ended the pass that it needs, the sending included. The
orders are those of GPipe (FThenB: all forward passes, then all backward passes), of PipeDream-Flush (1F1B, arXiv 2006.09503)
and of Megatron's interleaved schedule (VPP, arXiv 2104.04473, section 2.2). With equal stages the makespans
are (m + p - 1)(f + b), and (m + (p - 1) / v)(f + b) for the interleaved one; the simulation also knows unequal stages.

In the steady state every further micro batch adds the time of the busiest stage. Only the first rounds are simulated, the rest
are added.
"""

from __future__ import annotations

from functools import lru_cache

from paddle_rbt_plugin.cost.candidate import Schedule

Pass = tuple[int, int, bool]
"""Micro batch, chunk, and whether it is a backward pass."""

SIMULATED_ROUNDS = 4
"""Rounds of as many micro batches as there are stages that are simulated; what is added for the rest was within 1.2 %
of a full simulation for random stages that differ by factors up to 40, see tests/test_cost_pipeline.py."""


def stage_order(schedule: Schedule, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> list[Pass]:
    """The passes of one stage in the order in which it executes them."""
    if schedule == "VPP" and chunks > 1:
        forward, backward = _interleaved(stages, micro_batches, chunks)
        warm_up = _interleaved_warm_up(stage, stages, micro_batches, chunks)
    else:
        forward = [(i, 0, False) for i in range(micro_batches)]
        backward = [(i, 0, True) for i in range(micro_batches)]
        warm_up = micro_batches if schedule == "FThenB" else min(stages - 1 - stage, micro_batches)
    order = forward[:warm_up]
    for ahead, back in zip(forward[warm_up:], backward, strict=False):
        order += (ahead, back)
    return order + backward[len(forward) - warm_up :]


def _interleaved(stages: int, micro_batches: int, chunks: int) -> tuple[list[Pass], list[Pass]]:
    """Groups of ``stages`` micro batches go through all chunks, forward from the first chunk, backward from the last."""
    forward: list[Pass] = []
    backward: list[Pass] = []
    for start in range(0, micro_batches, stages):
        group = range(start, min(start + stages, micro_batches))
        forward += [(i, c, False) for c in range(chunks) for i in group]
        backward += [(i, c, True) for c in reversed(range(chunks)) for i in group]
    return forward, backward


def _interleaved_warm_up(stage: int, stages: int, micro_batches: int, chunks: int) -> int:
    """Forward passes of a stage before it alternates. Megatron-LM and Paddle first run all of a step of one group forward."""
    every = micro_batches * chunks
    return every if micro_batches == stages else min((stages - 1 - stage) * 2 + (chunks - 1) * stages, every)


def in_flight(schedule: Schedule, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> float:
    """The most micro batches that a stage keeps activations of, a chunk counted as its part of the stage."""
    if schedule == "FThenB":
        return micro_batches
    if schedule == "VPP" and chunks > 1:
        return min(_interleaved_warm_up(stage, stages, micro_batches, chunks) + 1, micro_batches * chunks) / chunks
    return min(stages - stage, micro_batches)


def makespan(
    schedule: Schedule,
    forward: tuple[tuple[float, ...], ...],
    backward: tuple[tuple[float, ...], ...],
    micro_batches: int,
) -> float:
    """Seconds from the first forward pass to the end of the last backward pass.

    ``forward[s][c]`` and ``backward[s][c]`` are the times of one pass through chunk ``c`` of stage ``s``.
    """
    stages = len(forward)
    if stages == 1:
        return micro_batches * (sum(forward[0]) + sum(backward[0]))
    rounds = SIMULATED_ROUNDS * stages + micro_batches % stages
    if schedule == "FThenB" or micro_batches <= rounds:
        return _simulate(schedule, forward, backward, micro_batches)
    busiest = max(sum(f) + sum(b) for f, b in zip(forward, backward, strict=True))
    return _simulate(schedule, forward, backward, rounds) + (micro_batches - rounds) * busiest


@lru_cache(maxsize=1024)
def _plan(schedule: Schedule, stages: int, micro_batches: int, chunks: int) -> list[tuple[int, int, int]]:
    """The passes of all stages, each behind the one that it waits for: the stage, the place of its seconds among those of the
    forward passes (chunk by chunk, stage by stage) and then the backward passes, and the position of the one it waits for, -1
    for none."""
    parts = chunks * stages
    orders = [
        [(i * 2 * parts + (parts if back else 0) + c * stages + s) for i, c, back in order]
        for s, order in enumerate(stage_order(schedule, s, stages, micro_batches, chunks) for s in range(stages))
    ]
    at = [-1] * (2 * parts * micro_batches)
    """Position of each pass in the plan, by micro batch and place of its seconds."""
    # Per place of seconds, how far away the place lies of the pass that it waits for.
    waits: list[int | None] = [None, *[-1] * (parts - 1), *[1] * (parts - 1), -parts]
    plan: list[tuple[int, int, int]] = []
    position, waiting = [0] * stages, list(range(stages))
    while waiting:
        s = waiting.pop()
        order, done = orders[s], position[s]
        for what in order[done:]:
            place = what % (2 * parts)
            away = waits[place]
            source = -1
            if away is not None:
                source = at[what + away]
                if source < 0:
                    break
            at[what] = len(plan)
            plan.append((s, place, source))
            done += 1
        if done > position[s]:
            position[s] = done
            for neighbour in ((s + 1) % stages, (s - 1) % stages):
                if neighbour not in waiting:
                    waiting.append(neighbour)
    return plan


@lru_cache(maxsize=4096)
def _simulate(
    schedule: Schedule,
    forward: tuple[tuple[float, ...], ...],
    backward: tuple[tuple[float, ...], ...],
    micro_batches: int,
) -> float:
    stages, chunks = len(forward), len(forward[0])
    seconds = [of[s][c] for of in (forward, backward) for c in range(chunks) for s in range(stages)]
    free = [0.0] * stages
    ends: list[float] = []
    for s, place, source in _plan(schedule, stages, micro_batches, chunks):
        start = free[s]
        if source >= 0 and ends[source] > start:
            start = ends[source]
        free[s] = end = start + seconds[place]
        ends.append(end)
    return max(free)
