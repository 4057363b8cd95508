"""Training under a plan gives the serial loss: every model of the zoo, in dygraph, two CPU processes along ``mp``."""

from __future__ import annotations

import pytest
from launching import launch
from zoo import ZOO


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Serial and parallel losses of all models, from one launch."""
    return launch("zoo_training.py", 2, tmp_path_factory.mktemp("zoo") / "losses.json", timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_training_under_the_mp_plan_gives_the_serial_loss(losses, name):
    serial, parallel = losses[name]["serial"], losses[name]["parallel"]
    assert parallel == pytest.approx(serial, abs=1e-5)
    assert serial[-1] != pytest.approx(serial[0], abs=1e-4), "three steps must change the loss"
