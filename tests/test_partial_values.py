"""What Paddle leaves partial is settled before the first op that needs it, so that ranks train the serial model."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import launch_all


@pytest.mark.slow
def test_ranks_train_the_serial_model_whatever_reads_a_partial_value(tmp_path: Path) -> None:
    by_rank = launch_all("partial_values.py", 2, tmp_path / "out", timeout=900)
    for rank, found in enumerate(by_rank):
        failed = {name: text for name, text in found.items() if isinstance(text, str)}
        assert not failed, f"rank {rank}: {failed}"
        wrong = {name: d for name, d in found.items() if not (d["loss"] < 1e-5 and d["weight"] < 1e-4)}
        assert not wrong, f"rank {rank}: {wrong}"
