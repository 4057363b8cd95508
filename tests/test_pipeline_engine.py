"""``auto.Engine`` with ``strategy.tuning`` plans a pipeline and makes the jobs of every rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "FThenB"])
def test_the_engine_makes_the_jobs_of_every_rank_of_a_pipeline(schedule) -> None:
    worker = Path(__file__).parent / "workers" / "pipeline_engine.py"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(worker), json.dumps({"pp": 2, "dp": 2, "mp": 2}), "8", schedule],
        capture_output=True, text=True, env={**os.environ, "PADDLE_TRAINERS_NUM": "8"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("REPORT")).removeprefix("REPORT"))
    assert len(found) == 8
    for r in found:
        assert r["degrees"] == {"pp": 2, "dp": 2, "mp": 2}
        assert r["pipeline"] == [schedule, 2, 4]
        assert r["jobs"].count("forward") == r["jobs"].count("backward") == 4
        assert r["jobs"][-1] == "optimizer"
    first, second = ({tuple(found[rank]["parameters"]) for rank in stage} for stage in found[0]["stages"])
    assert len(first) == len(second) == 1
    assert not set(*first) & set(*second)
