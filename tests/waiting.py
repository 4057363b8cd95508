"""Waits for what another process does."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any


def until(happened: Callable[[], Any], process: subprocess.Popen | None = None, timeout: float = 120) -> None:
    """Returns when something has happened. Fails after ``timeout`` seconds, and when the process that does it has ended."""
    end = time.monotonic() + timeout
    while not happened():
        assert process is None or process.poll() is None, "the process has ended before"
        assert time.monotonic() < end, f"it has not happened within {timeout:g} s"
        time.sleep(0.05)
