"""Processes of a job end with the one that started them, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import until

from paddle_rbt_plugin.processes import Processes, kill

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


def alive(process: psutil.Process) -> bool:
    """True for a process that is there and no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_processes_end_when_the_one_that_started_them_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(script)], env=environment)
    until(lambda: len(list(tmp_path.glob("*/lines.*"))) == 2, parent)
    started = psutil.Process(parent.pid).children(recursive=True)
    assert len(started) >= 3  # the launcher and its workers
    assert all(map(alive, started))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not any(map(alive, started)))


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


GRANDPARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
time.sleep(100)
"""


def test_a_job_ends_what_its_launcher_started_and_no_process_that_a_file_names(tmp_path: Path) -> None:
    bystander = psutil.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    with Processes("the test", 1, 1, "steps", 100) as job:
        (job.directory / "pid.0").write_text(str(bystander.pid))
        launcher = job.launch([sys.executable, "-c", GRANDPARENT])
        until(launcher.children)
        started = [launcher, *launcher.children(recursive=True)]
    assert not any(map(alive, started))
    assert alive(bystander)
    kill([bystander])
    assert not alive(bystander)


def test_workers_are_ended_though_their_launcher_is_gone() -> None:
    with Processes("the test", 1, 1, "steps", 100) as job:
        launcher = job.launch([sys.executable, "-c", GRANDPARENT])
        until(launcher.children)
        job.check()
        workers = launcher.children()
        launcher.kill()
        launcher.wait()
        assert all(map(alive, workers))
    assert not any(map(alive, workers))
