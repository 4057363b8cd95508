"""A pipeline plan goes through Paddle's whole chain for every rank: what one rank sends another receives, parameters lie as
planned, and each schedule has its jobs.

Static sends and receives do not run on CPU (gloo), so the programs are made and compared here, not executed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

CASES = {
    "gpt pp2 dp2 mp2": ("gpt", {"pp": 2, "dp": 2, "mp": 2, "schedule": "1F1B"}, 8),
    "gpt pp4 dp1 mp2": ("gpt", {"pp": 4, "dp": 1, "mp": 2, "schedule": "FThenB"}, 8),
    "llama pp2 dp2 mp1": ("llama", {"pp": 2, "dp": 2, "mp": 1, "schedule": "1F1B"}, 4),
}


@cache
def reports(case: str) -> list[dict[str, Any]]:
    model, space, ranks = CASES[case]
    worker = Path(__file__).parent / "workers" / "pipeline_rank.py"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(worker), model, json.dumps(space), str(ranks)],
        capture_output=True, text=True, env={**os.environ, "PADDLE_TRAINERS_NUM": str(ranks)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(next(line for line in run.stdout.splitlines() if line.startswith("REPORT")).removeprefix("REPORT"))


pytestmark = pytest.mark.parametrize("case", list(CASES))


def test_each_message_is_sent_by_one_rank_and_received_by_another_in_the_same_order(case) -> None:
    sent, received = defaultdict(list), defaultdict(list)
    for r in reports(case):
        for kind, peer, shape, phase in r["messages"]:
            if kind == "send":
                sent[r["rank"], peer, phase].append(shape)
            else:
                received[peer, r["rank"], phase].append(shape)
    assert sent == received
    assert sent


def test_messages_go_between_ranks_at_the_same_place_of_their_stages(case) -> None:
    for r in reports(case):
        stages = r["stages"]
        place = {rank: (s, i) for s, ranks in enumerate(stages) for i, rank in enumerate(ranks)}
        for _, peer, _, _ in r["messages"]:
            assert place[peer][1] == place[r["rank"]][1]
            assert place[peer][0] != place[r["rank"]][0]


def test_parameters_lie_on_their_stage_with_the_planned_local_shapes(case) -> None:
    for r in reports(case):
        assert r["parameters"] == r["planned"]
    by_stage = [set(reports(case)[ranks[0]]["parameters"]) for ranks in reports(case)[0]["stages"]]
    assert all(by_stage)
    assert sum(map(len, by_stage)) == len(set().union(*by_stage))


def test_the_loss_is_on_the_last_stage(case) -> None:
    assert all(r["loss_ranks"] == r["stages"][-1] for r in reports(case))


def test_every_rank_runs_every_micro_batch_once_in_either_schedule(case) -> None:
    for r in reports(case):
        for schedule, jobs in r["jobs"].items():
            assert jobs.count("forward") == jobs.count("backward") == 4, schedule
            assert jobs[-1].startswith("opt")
        assert r["jobs"]["FThenB"][:8] == ["forward"] * 4 + ["backward"] * 4
    last = reports(case)[-1]["jobs"]["1F1B"]
    assert [j for j in last if j in ("forward", "backward")] == ["forward", "backward"] * 4
