"""Every change to Paddle that legacy programs need is still needed."""

from __future__ import annotations

import paddle_change_demonstrations as demonstrations
import pytest

from paddle_rbt_plugin.paddle_changes import CHANGES
from paddle_rbt_plugin.patching import PaddleChange


@pytest.mark.parametrize("change", [c for c in CHANGES if c.name in demonstrations.IN_LEGACY], ids=lambda change: change.name)
def test_paddle_still_needs_the_change(change: PaddleChange) -> None:
    if not change.is_needed():
        pytest.skip(f"the change is for Paddle {change.versions}, or for other devices")
    with change.left_out():
        getattr(demonstrations, change.name)()
