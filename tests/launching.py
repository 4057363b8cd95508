"""Starts scripts of tests/workers in one or several CPU processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).parent / "workers"


def launch(script: str, processes: int, out: Path, *args: str, timeout: float = 300) -> Any:
    """Runs a worker script, which writes JSON to its last argument, and returns what it wrote."""
    _start(script, processes, out, args, timeout)
    assert out.exists(), f"{script} {args} wrote nothing"
    return json.loads(out.read_text())


def launch_all(script: str, processes: int, out: Path, *args: str, timeout: float = 300) -> list[Any]:
    """Runs a worker script of which every rank writes JSON to its last argument and ``.RANK``; returns that by rank."""
    _start(script, processes, out, args, timeout)
    return [json.loads(out.with_name(f"{out.name}.{rank}").read_text()) for rank in range(processes)]


def _start(script: str, processes: int, out: Path, args: tuple[str, ...], timeout: float) -> None:
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "paddle.distributed.launch", "--nproc_per_node", str(processes), "--backend", "gloo"]
        command += ["--log_dir", str(out.parent / "log")]
    command += [str(WORKERS / script), *args, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=out.parent, check=False)
    logs = "\n".join(p.read_text()[-3000:] for p in sorted(out.parent.glob("log/workerlog.*")))
    assert done.returncode == 0, f"{script} {args} failed:\n{logs or done.stderr[-3000:]}"
