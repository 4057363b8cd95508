"""A pipeline plan goes through Paddle's whole chain for every rank: what one rank sends another receives, parameters lie as
planned, each schedule has its jobs, and these, played against each other, end with every message where it belongs.

Static sends and receives do not run on CPU (gloo), so the programs are made and compared here, not executed.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from launching import reported

OPTIMIZE = 2
"""The role of the ops of the update."""
CASES = {
    "gpt pp2 dp2 mp2": ("gpt", {"pp": 2, "dp": 2, "mp": 2, "schedule": "1F1B", "accumulate_steps": 4}, 8),
    "gpt pp4 dp1 mp2": ("gpt", {"pp": 4, "dp": 1, "mp": 2, "schedule": "FThenB", "accumulate_steps": 4}, 8),
    "llama pp2 dp2 mp1": ("llama", {"pp": 2, "dp": 2, "mp": 1, "schedule": "1F1B", "accumulate_steps": 4}, 4),
    "gpt pp2 vpp2": ("gpt", {"pp": 2, "dp": 1, "mp": 1, "vpp": 2, "accumulate_steps": 6}, 2),
    "gpt pp2 dp2 mp2 vpp2": ("gpt", {"pp": 2, "dp": 2, "mp": 2, "vpp": 2, "accumulate_steps": 2}, 8),
    "gpt pp4 vpp2": ("gpt", {"pp": 4, "dp": 1, "mp": 1, "vpp": 2, "accumulate_steps": 8}, 4),
    "llama pp4 vpp2": ("llama", {"pp": 4, "dp": 1, "mp": 1, "vpp": 2, "accumulate_steps": 8}, 4),
    "llama pp2 dp1 mp2 vpp3": ("llama", {"pp": 2, "dp": 1, "mp": 2, "vpp": 3, "accumulate_steps": 4}, 4),
}


@cache
def reports(case: str) -> list[dict[str, Any]]:
    model, space, ranks = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (model, json.dumps(space), str(ranks))
        return reported("pipeline_rank.py", Path(folder), *arguments, PADDLE_TRAINERS_NUM=str(ranks))


pytestmark = pytest.mark.parametrize("case", list(CASES))


def test_each_message_is_sent_by_one_rank_and_received_by_another(case) -> None:
    sent, received = Counter(), Counter()
    for r in reports(case):
        for kind, peer, shape, phase in r["messages"]:
            ends = (r["rank"], peer) if kind == "send" else (peer, r["rank"])
            (sent if kind == "send" else received)[(*ends, phase, *shape)] += 1
    assert sent == received
    assert sent


def test_messages_go_between_ranks_at_the_same_place_of_neighbouring_stages(case) -> None:
    for r in reports(case):
        stages = r["stages"]
        place = {rank: (s, i) for s, ranks in enumerate(stages) for i, rank in enumerate(ranks)}
        apart = {1, len(stages) - 1} if "vpp" in CASES[case][1] else {1}  # chunks go round
        for _, peer, _, phase in r["messages"]:
            assert place[peer][1] == place[r["rank"]][1]
            if phase != OPTIMIZE:  # once a step the ends of a shared weight meet
                assert abs(place[peer][0] - place[r["rank"]][0]) in apart


def test_parameters_lie_on_their_stage_with_the_planned_local_shapes(case) -> None:
    for r in reports(case):
        assert r["parameters"] == r["planned"]
    by_stage = [set(reports(case)[ranks[0]]["parameters"]) for ranks in reports(case)[0]["stages"]]
    assert all(by_stage)
    held = Counter(name for names in by_stage for name in names)
    # The head of GPT is tied to the embedding of tokens, which lies on both ends.
    assert sorted(held.values())[-2:] == ([1, 2] if case.startswith("gpt") else [1, 1])
    assert all(name in by_stage[0] & by_stage[-1] for name, stages in held.items() if stages > 1)


def test_the_loss_is_on_the_last_stage(case) -> None:
    assert all(r["loss_ranks"] == r["stages"][-1] for r in reports(case))


def test_every_rank_runs_every_micro_batch_once_and_each_chunk_forward_before_backward(case) -> None:
    space = CASES[case][1]
    chunks = [str(i) for i in range(space["vpp"])] if "vpp" in space else [""]
    for r in reports(case):
        for schedule, jobs in r["jobs"].items():
            assert (schedule == "VPP") == ("vpp" in space)
            order = {(type_, micro_batch): i for i, (type_, micro_batch) in enumerate(jobs)}
            assert len(order) == len(jobs)
            for chunk in chunks:
                for phase in ("forward", "backward"):
                    steps = [micro_batch for type_, micro_batch in jobs if type_ == phase + chunk]
                    assert steps == list(range(space["accumulate_steps"]))
                assert all(order["forward" + chunk, m] < order["backward" + chunk, m] for m in steps)
            assert jobs[-1][0].startswith("opt")


def test_the_schedules_differ_in_when_they_go_back(case) -> None:
    last = {s: [type_ for type_, _ in jobs if type_[:4] in ("forw", "back")] for s, jobs in reports(case)[-1]["jobs"].items()}
    if "VPP" in last:
        chunks, steps = CASES[case][1]["vpp"], CASES[case][1]["accumulate_steps"]
        warm = (chunks - 1) * CASES[case][1]["pp"] + 1 if steps > CASES[case][1]["pp"] else chunks * steps
        assert all(type_.startswith("forward") for type_ in last["VPP"][:warm])
        assert last["VPP"][warm] == f"backward{chunks - 1}"
    else:
        assert last["1F1B"] == ["forward", "backward"] * 4
        assert last["FThenB"] == ["forward"] * 4 + ["backward"] * 4
