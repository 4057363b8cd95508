"""The tests of the legacy IR, in a process whose flag says so before Paddle is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import paddle
import pytest

FLAG = "FLAGS_enable_pir_api"
FOLDER = Path(__file__).parent / "legacy"


@pytest.mark.slow
@pytest.mark.skipif(not paddle.get_flags(FLAG)[FLAG], reason="this process runs the legacy IR itself")
def test_the_legacy_ir_passes_its_tests_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", str(FOLDER)]
    done = subprocess.run(command, env=os.environ | {FLAG: "0"}, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
