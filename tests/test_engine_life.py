"""What an engine does over its life: any order of training, evaluation and prediction, with the results of a serial run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import launch, reported

DP, MP = {"dp": 2, "mp": 1, "sharding_stage": 0}, {"mp": 2}
FIT, SHORT, EVALUATE, PREDICT = ["fit", 32, 8, 2], ["fit", 27, 8], ["evaluate", 29, 8], ["predict", 21, 8]
LIVES = {
    "fit twice": {"space": DP, "acts": [FIT, FIT]},
    "everything twice": {"space": DP, "acts": [FIT, EVALUATE, PREDICT, SHORT, PREDICT, EVALUATE]},
    "everything twice, mp2": {"space": MP, "acts": [FIT, EVALUATE, PREDICT, SHORT, PREDICT, EVALUATE]},
    "evaluate first": {"space": DP, "acts": [EVALUATE, FIT, EVALUATE]},
    "predict first": {"space": DP, "acts": [PREDICT, EVALUATE, FIT, PREDICT]},
    "predict first, mp2": {"space": MP, "acts": [PREDICT, EVALUATE, FIT, PREDICT]},
    "batches of other sizes": {
        "space": DP,
        "acts": [FIT, ["fit", 32, 16], ["evaluate", 30, 4], EVALUATE, FIT, ["predict", 8, 2]],
    },
    "micro batches": {"space": DP, "micro_batches": 2, "clip": True, "acts": [FIT, EVALUATE, SHORT, PREDICT, FIT]},
    "ZeRO 2 and micro batches": {
        "space": {"dp": 2, "sharding_stage": 2},
        "micro_batches": 2,
        "acts": [FIT, EVALUATE, ["fit", 32, 16], PREDICT],
    },
    "Momentum": {"space": DP, "optimizer": "Momentum", "rate": 0.1, "acts": [PREDICT, FIT, EVALUATE, SHORT]},
}
ALONE = {name: {**life, "space": {}} for name, life in LIVES.items() if life["space"] is DP}


def check(by_rank: list[dict[str, dict]], lives: dict[str, dict]) -> None:
    for found in by_rank:
        assert found.keys() == lives.keys()
        for name, life in found.items():
            assert len(life["numbers"]) == len(lives[name]["acts"])
            assert max(life["numbers"]) < 1e-5, (name, life)
            assert life["weights"] < 1e-4, (name, life)


@pytest.mark.slow
def test_every_rank_of_an_engine_sees_what_a_serial_run_sees(tmp_path: Path) -> None:
    check(launch("engine_life.py", 2, tmp_path / "result.json", json.dumps(LIVES), timeout=900), LIVES)


def test_an_engine_of_one_process_lives_as_a_serial_model(tmp_path: Path) -> None:
    check(launch("engine_life.py", 1, tmp_path / "result.json", json.dumps(ALONE)), ALONE)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "vpp"), [("1F1B", 1), ("VPP", 2)])
def test_evaluation_runs_a_pipeline_without_its_jobs(schedule: str, vpp: int, tmp_path: Path) -> None:
    space = json.dumps({"pp": 2, "dp": 1, "mp": 1, "vpp": vpp})
    report = reported("pipeline_evaluation.py", tmp_path, "gpt", space, "2", schedule, PADDLE_TRAINERS_NUM="2")
    assert report["sent"] > 0


def check_uses(by_rank: list[dict[str, dict]]) -> None:
    for found in by_rank:
        assert not {name: use["error"] for name, use in found.items() if "error" in use}
        for name, use in found.items():
            assert max(use["differences"]) < 1e-5, (name, use)


def test_uses_of_an_engine_in_one_process(tmp_path: Path) -> None:
    check_uses(launch("engine_uses.py", 1, tmp_path / "result.json"))


@pytest.mark.slow
def test_uses_of_an_engine_in_two_processes(tmp_path: Path) -> None:
    check_uses(launch("engine_uses.py", 2, tmp_path / "result.json", timeout=900))
