"""Training legacy programs through ``auto.Engine``: the serial losses, in one process and in two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from launching import launch_all

WORKER = Path(__file__).parent / "engine_worker.py"
STEPS = 4


def train(folder: Path, settings: dict | None, processes: int = 1, clip: str = "none") -> list[dict[str, Any]]:
    """What every rank saw."""
    folder.mkdir(parents=True)
    return launch_all(str(WORKER), processes, folder / "result", json.dumps(settings), str(STEPS), clip)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Paddle's own engine without the tuner."""
    return train(tmp_path_factory.mktemp("stock") / "run", None)[0]


@pytest.mark.slow
def test_one_process_trains_to_losses_identical_to_the_engine_without_a_tuner(tmp_path: Path, stock: dict) -> None:
    tuned = train(tmp_path / "run", {})[0]
    assert tuned["losses"] == stock["losses"]
    assert tuned["evaluated"] == stock["evaluated"]
    assert tuned["predicted"] == stock["predicted"]


@pytest.mark.slow
def test_evaluation_reuses_the_plan_of_training(tmp_path: Path) -> None:
    placed = train(tmp_path / "run", {})[0]["placements"]
    assert placed["eval"] == placed["train"]


two_processes = pytest.mark.skipif(
    not paddle.__version__.startswith(("2.6", "3.1")),
    reason="legacy programs communicate between CPU processes up to Paddle 3.1",
)


@pytest.mark.slow
@two_processes
@pytest.mark.parametrize("space", [{"dp": 2}, {"mp": 2}], ids=["dp2", "mp2"])
def test_two_processes_train_to_the_serial_loss(tmp_path: Path, stock: dict, space: dict) -> None:
    # CPU lacks the kernel that gathers logits of a sharded vocabulary.
    settings = {"search_space": space, "blocked_plugins": ["shared_word_embedding"]}
    ranks = train(tmp_path / "run", settings, processes=2)
    losses = np.mean([r["losses"] for r in ranks], axis=0)  # a rank logs the loss of its part of the batch
    np.testing.assert_allclose(losses, stock["losses"], rtol=0, atol=1e-5)
    assert all(r["plan"]["degrees"] == {"pp": 1, "dp": 1, "mp": 1} | space for r in ranks)
    assert all(r["placements"]["eval"] == r["placements"]["train"] for r in ranks)


@pytest.mark.slow
@two_processes
@pytest.mark.parametrize("space", [{"dp": 2}, {"mp": 2}], ids=["dp2", "mp2"])
def test_two_processes_clip_by_the_norm_of_all_gradients_as_one_does(tmp_path: Path, space: dict) -> None:
    serial = train(tmp_path / "stock", None, clip="global norm")[0]["losses"]
    settings = {"search_space": space, "blocked_plugins": ["shared_word_embedding"]}
    ranks = train(tmp_path / "run", settings, processes=2, clip="global norm")
    losses = np.mean([r["losses"] for r in ranks], axis=0)
    np.testing.assert_allclose(losses, serial, rtol=0, atol=1e-5)


@pytest.mark.slow
@two_processes
def test_a_clip_by_the_norm_of_each_gradient_is_refused_where_gradients_are_divided(tmp_path: Path) -> None:
    settings = {"search_space": {"mp": 2}, "blocked_plugins": ["shared_word_embedding"]}
    with pytest.raises(AssertionError, match="TunerError: in legacy programs ClipGradByNorm would clip each part of"):
        train(tmp_path / "run", settings, processes=2, clip="norm")
