"""A step under a pipeline is the step of the serial model, and no ranks whose sends wait for their receives wait in a circle.

The jobs of all ranks, as ``auto.Engine`` makes them, are played against each other (``workers/pipeline_play.py``), with
numbers.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from launching import launch

CLIP = 0.1
"""Below the norm of the gradients of every model here."""


def case(model: str, schedule: str, pp: int, dp: int = 1, mp: int = 1, vpp: int = 1, **more: Any) -> dict[str, Any]:
    settings = {key: more.pop(key) for key in ("recompute", "sharding_stage") if key in more}
    return {"model": model, "schedule": schedule, "space": {"pp": pp, "dp": dp, "mp": mp, "vpp": vpp, **settings}, **more}


NARROW = {
    "gpt pp2 1F1B": case("gpt/2", "1F1B", 2),
    "gpt pp2 FThenB, recomputed": case("gpt/2", "FThenB", 2, recompute="full", clip=CLIP),
    "llama pp2 VPP, recomputed": case("llama/4", "VPP", 2, vpp=2, recompute="full"),
    "gpt pp4 VPP, cores recomputed": case("gpt/8", "VPP", 4, vpp=2, recompute="selective", steps=8, clip=CLIP),
    "llama pp4 FThenB": case("llama/4", "FThenB", 4, steps=8, clip=CLIP, kind="adamw"),
    "biased pp4 1F1B": case("biased/4", "1F1B", 4, steps=8, clip=CLIP, kind="adamw"),
    "biased pp4 FThenB": case("biased/4", "FThenB", 4),
    "biased pp4 VPP": case("biased/8", "VPP", 4, vpp=2, clip=CLIP),
    "gpt pp8 1F1B": case("gpt/8", "1F1B", 8, clip=CLIP),
    "llama pp8 FThenB": case("llama/8", "FThenB", 8),
    "biased pp8 1F1B": case("biased/8", "1F1B", 8),
    "gpt pp8 VPP": case("gpt/16", "VPP", 8, vpp=2, clip=CLIP),
}
WIDE = {
    "gpt pp2 x dp2 x mp2 1F1B": case("gpt/2", "1F1B", 2, 2, 2, clip=CLIP, kind="adamw"),
    "gpt pp2 x dp2 x mp2 FThenB": case("gpt/2", "FThenB", 2, 2, 2, steps=8),
    "llama pp2 x dp2 x mp2 VPP": case("llama/4", "VPP", 2, 2, 2, 2, clip=CLIP, kind="momentum"),
    "biased pp2 x dp2 x mp2 1F1B": case("biased/2", "1F1B", 2, 2, 2, steps=8, clip=CLIP),
    "gpt pp2 x dp2 ZeRO 1": case("gpt/2", "1F1B", 2, 2, sharding_stage=1, clip=CLIP, kind="adamw"),
    "gpt pp2 x dp2 ZeRO 2": case("gpt/2", "1F1B", 2, 2, sharding_stage=2, clip=CLIP, kind="adamw"),
    "biased pp4 1F1B, sent directly": case("biased/4", "1F1B", 4, steps=8) | {"direct": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("cases", [NARROW, WIDE], ids=["one rank a stage", "several ranks a stage"])
def test_a_step_under_a_pipeline_is_the_serial_step(cases, tmp_path) -> None:
    found = launch("pipeline_plays.py", 1, tmp_path / "played.json", json.dumps(cases), timeout=1800)
    for name, report in found.items():
        if cases[name].get("direct"):
            assert "ranks wait for each other" in report["wrong"]
            continue
        assert "wrong" not in report, (name, report)
        assert report["losses"] == pytest.approx(report["serial_losses"], rel=1e-6), name
        assert report["loss_on_ranks"] < 1e-5, name
        for parameter, moved in report["moved"].items():
            assert report["differ"][parameter] <= 1e-5 * moved + 2 * report["ulp"][parameter] + 1e-9, (name, parameter)
        assert report["apart"] == 0, name  # replicas and both ends of a shared weight, their states too
