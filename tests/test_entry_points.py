"""Training through every entry point, in one process and in several: one plan, and the serial loss."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from launching import launch

STEPS = 4
ENTRIES = ("pass", "engine-attributes", "engine-dict", "engine-run", "to_static", "dygraph")


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    out = tmp_path_factory.mktemp("serial") / "result.json"
    return launch("entry_points.py", 1, out, "serial", "{}", str(STEPS))["losses"]


def plan_of(result: dict) -> dict:
    """The decision of a plan. An Engine lets gradients flow into its float inputs, so its program costs a trifle more."""
    plan = {k: v for k, v in result["plan"].items() if k not in ("tensors", "rejected", "candidates", "estimate")}
    placements = [(t["dims_mapping"], t["pattern"], t["kind"]) for t in result["plan"]["tensors"].values()]
    return plan | {"placements": placements}


@pytest.mark.slow
@pytest.mark.parametrize("space", [{"mp": 2}, {"dp": 2, "sharding_stage": 0}], ids=["mp2", "dp2"])
def test_every_entry_point_finds_the_same_plan_and_trains_to_the_serial_loss(
    tmp_path: Path, serial: list[float], space: dict
) -> None:
    results = {}
    for entry in ENTRIES:
        folder = tmp_path / entry
        folder.mkdir()
        results[entry] = launch("entry_points.py", 2, folder / "result.json", entry, json.dumps(space), str(STEPS))
    plans = {entry: plan_of(result) for entry, result in results.items()}
    static = [plans[entry] for entry in ENTRIES if entry != "dygraph"]
    assert all(plan == static[0] for plan in static)
    assert plans["dygraph"]["degrees"] == static[0]["degrees"]
    for entry, result in results.items():
        if entry != "pass":
            np.testing.assert_allclose(result["losses"], serial, rtol=0, atol=1e-5, err_msg=entry)
    assert results["engine-dict"]["evaluated"] == pytest.approx(results["engine-attributes"]["evaluated"], abs=1e-5)
    assert results["engine-dict"]["evaluated"] < serial[-1]


@pytest.mark.slow
def test_both_orders_of_two_axes_train_to_the_serial_loss_in_dygraph(tmp_path: Path, serial: list[float]) -> None:
    for order in ("dp_mp", "mp_dp"):
        space = json.dumps({"dp": 2, "mp": 2, "order": order})
        folder = tmp_path / order
        folder.mkdir()
        result = launch("entry_points.py", 4, folder / "result.json", "dygraph", space, str(STEPS))
        assert result["plan"]["stages"][0]["axes"] == order.split("_")
        np.testing.assert_allclose(result["losses"], serial, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_one_process_trains_exactly_as_without_the_tuner(tmp_path: Path, serial: list[float]) -> None:
    result = launch("entry_points.py", 1, tmp_path / "result.json", "engine-attributes", "{}", str(STEPS))
    assert result["losses"] == serial


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["engine-merge", "engine-amp"])
def test_fit_trains_with_gradient_merge_and_in_half_precision(tmp_path: Path, serial: list[float], entry: str) -> None:
    space = json.dumps({"dp": 2, "recompute": "none"})
    result = launch("entry_points.py", 2, tmp_path / "result.json", entry, space, str(STEPS))
    assert len(result["losses"]) == STEPS
    np.testing.assert_allclose(result["losses"], serial, rtol=0, atol=1e-5 if entry == "engine-merge" else 0.05)
