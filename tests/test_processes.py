"""Processes of a job end with the one that started them, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

WORKER = """
import itertools, sys, time
from paddle_rbt_plugin.processes import work
work(sys.argv[1], (time.sleep(0.1) for _ in itertools.count()))
"""

PARENT = """
import sys, time
from paddle_rbt_plugin.processes import Processes
with Processes("the test", 2, 1, "steps", 100) as job:
    job.start(sys.argv[1])
    while True:
        job.check()
        time.sleep(0.1)
"""


def alive(pid: int) -> bool:
    """True for a process that is there and no zombie."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_processes_end_when_the_one_that_started_them_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(script)], env=environment)
    until(lambda: len(list(tmp_path.glob("*/lines.*"))) == 2, parent)
    workers = [int(path.read_text()) for path in tmp_path.glob("*/pid.*")]
    launcher = int(Path(f"/proc/{workers[0]}/stat").read_text().rpartition(")")[2].split()[1])
    assert all(map(alive, [*workers, launcher]))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not any(map(alive, [*workers, launcher])))


def test_a_process_that_watches_its_parent_runs_until_that_is_gone() -> None:
    program = (
        "import time; from paddle_rbt_plugin.processes import end_with_parent as e; e(); print(1, flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-W", "ignore", "-c", program], stdin=-1, stdout=-1)
    assert child.stdout.readline() == b"1\n"
    assert child.poll() is None
    child.stdin.close()
    assert child.wait(timeout=30) == -signal.SIGKILL
    child.stdout.close()
