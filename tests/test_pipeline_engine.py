"""``auto.Engine`` with ``strategy.tuning`` plans a pipeline and makes the jobs of every rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import reported


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "schedule", "precision"),
    [
        ("gpt", "1F1B", "float32"),
        ("gpt", "FThenB", "float32"),
        ("gpt", "VPP", "float32"),
        pytest.param(
            "gpt",
            "VPP",
            "float16",
            marks=pytest.mark.xfail(reason="ranks meet in different collectives of loss scaling"),
        ),
        ("llama", "VPP", "bfloat16"),
    ],
)
def test_the_engine_makes_the_jobs_of_every_rank_of_a_pipeline(model, schedule, precision, tmp_path: Path) -> None:
    space = {"pp": 2, "dp": 2, "mp": 2, "vpp": 2 if schedule == "VPP" else 1}
    arguments = (model, json.dumps(space), "8", schedule, precision)
    found = reported("pipeline_engine.py", tmp_path, *arguments, PADDLE_TRAINERS_NUM="8")
    assert len(found) == 8
    for r in found:
        assert r["degrees"] == {"pp": 2, "dp": 2, "mp": 2}
        assert r["pipeline"] == [schedule, 2, space["vpp"], 4]
        types = [type_ for type_, _ in r["jobs"]]
        for chunk in ("0", "1") if schedule == "VPP" else ("",):
            assert types.count("forward" + chunk) == types.count("backward" + chunk) == 4
        assert types[-1] == "optimizer"
    first, second = ({tuple(found[rank]["parameters"]) for rank in stage} for stage in found[0]["stages"][:2])
    assert len(first) == len(second) == 1
    # The embedding of tokens, to which the head of GPT is tied, lies on both ends under its own name.
    assert len(set(*first) & set(*second)) == (1 if model == "gpt" else 0)
