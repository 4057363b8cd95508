"""A step under a pipeline is the step of the serial model: the jobs of all ranks, as ``auto.Engine`` makes them, are copied
into one program in the order in which the ranks run them, and that program is executed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "workers" / "pipeline_numbers.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "pp", "vpp", "schedule", "recompute"),
    [
        ("gpt", 2, 1, "1F1B", "none"),
        ("gpt", 2, 1, "FThenB", "full"),
        ("gpt", 2, 2, "VPP", "none"),
        ("llama", 2, 2, "VPP", "full"),
        ("gpt", 4, 2, "VPP", "selective"),
    ],
)
def test_a_step_under_a_pipeline_is_the_serial_step(model, pp, vpp, schedule, recompute) -> None:
    space = json.dumps({"pp": pp, "dp": 1, "mp": 1, "vpp": vpp, "recompute": recompute})
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(WORKER), model, space, str(pp), schedule],
        capture_output=True, text=True, env={**os.environ, "PADDLE_TRAINERS_NUM": str(pp)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("REPORT")).removeprefix("REPORT"))
    assert found["losses"] == pytest.approx(found["serial_losses"], rel=1e-6)
    for name, moved in found["moved"].items():
        assert found["differ"][name] <= 1e-5 * moved + 1e-9, name
