"""The processes of one job on this machine: started through ``paddle.distributed.launch``, monitored, and ended with everything
that they leave behind.

Each of them runs a script that calls ``work`` with the lines that it reports.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from paddle_rbt_plugin.errors import TunerError

_LOG_LINES = 15
_WORKER = "PADDLE_RBT_WORKER"
"""Set in every process of a job."""


class Terminated(KeyboardInterrupt):
    """SIGTERM. Like an interrupt from the keyboard, it is not caught by code that catches the exceptions of plugins and
    models."""

    exit_code = 128 + signal.SIGTERM


@contextmanager
def unwound_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM raise Terminated, so that ``with`` blocks inside end what they have started.

    Takes effect only in the main thread, which alone receives signals, and only if SIGTERM has its default handler."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def terminate(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut the ending short
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def end_with_parent() -> None:
    """Makes this process end when its parent is gone, even if the parent was killed: the parent holds the other end of standard
    input, a pipe to which nothing is written."""

    def wait() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def descendants(process: psutil.Process) -> set[psutil.Process]:
    """Every process that ``process`` has started, directly or indirectly; empty if it is gone."""
    with suppress(psutil.NoSuchProcess):
        return set(process.children(recursive=True))
    return set()


def kill(processes: Iterable[psutil.Process], timeout: float = 10) -> None:
    """Kills the processes and waits up to ``timeout`` seconds until they are gone.

    psutil compares creation times first, so a process that has reused an id is not killed. A zombie counts as gone, since in a
    container there may be nobody to reap it."""
    running = list(processes)
    for process in running:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + timeout
    while running and time.monotonic() < deadline:
        running = [p for p in psutil.wait_procs(running, 0.05)[1] if not _is_zombie(p)]


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def work(directory: str, lines: Iterable[Any]) -> None:
    """The body of a started process: joins the others, then iterates over ``lines`` and reports each of them as JSON.

    It creates a file ``done.RANK`` in the directory when it has succeeded."""
    end_with_parent()
    import paddle
    import paddle.distributed as dist

    rank = os.environ["PADDLE_TRAINER_ID"]
    on_cpu = os.environ.get("PADDLE_DISTRI_BACKEND") == "gloo"  # the launcher says so
    paddle.set_device("cpu" if on_cpu else f"gpu:{dist.ParallelEnv().device_id}")
    dist.init_parallel_env()
    with Path(directory, f"lines.{rank}").open("w") as file:
        for line in lines:
            print(json.dumps(line), file=file, flush=True)
    Path(directory, f"done.{rank}").touch()


class Processes:
    """The processes of one job, as a ``with`` block that none of them outlives.

    ``what`` names the job in messages; ``lines`` is the number of lines that each process will report, one per ``unit``;
    ``timeout`` is the time limit in seconds. ``directory`` belongs to the job and is deleted with it; put the files that the
    processes read there.

    Raises TunerError inside a process of a job, which would start jobs endlessly."""

    def __init__(self, what: str, count: int, lines: int, unit: str, timeout: float):
        if _WORKER in os.environ:
            raise TunerError(
                f"{what} is called again inside a worker, since the workers import the script that started them: "
                "put the call under if __name__ == '__main__'"
            )
        self.what, self.count, self.expected, self.unit, self.timeout = what, count, lines, unit, timeout
        self._temporary = tempfile.TemporaryDirectory(prefix="paddle-rbt-")
        self.directory = Path(self._temporary.name)
        self._launcher: psutil.Popen | None = None
        self._started: set[psutil.Process] = set()  # seen while the launcher ran: when it is gone, nothing leads to them
        self._signals = ExitStack()
        self._deadline = 0.0

    def start(self, script: str, *arguments: str, gpus: bool = False) -> None:
        """Runs ``script DIRECTORY ARGUMENTS...`` in each process: each on its own CUDA device, or on the CPU, where they share
        the cores."""
        command = [sys.executable, "-m", "paddle.distributed.launch", "--log_dir", str(self.directory / "log")]
        if gpus:
            command += ["--devices", ",".join(map(str, range(self.count)))]
        else:
            command += ["--nproc_per_node", str(self.count), "--backend", "gloo"]
        self.launch([*command, script, str(self.directory), *arguments])

    def launch(self, command: Sequence[str]) -> psutil.Popen:
        """Runs a launcher, whose descendants are the processes of the job; returns it."""
        environment = _environment(self.count, self._temporary.name)
        self._deadline = time.monotonic() + self.timeout
        with (self.directory / "launch.log").open("wb") as log:
            # It gets a session of its own, so that Ctrl-C reaches only this process, which then ends the others. The launcher
            # passes its standard input on to them, so all of them notice when this process ends (end_with_parent).
            self._launcher = psutil.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        return self._launcher

    def __enter__(self) -> Processes:
        self._signals.enter_context(unwound_on_sigterm())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with self._signals:
            if self._launcher is not None:
                with suppress(psutil.NoSuchProcess):
                    self._launcher.suspend()  # it starts none after they are listed; on SIGTERM it would leave them behind
                self._started |= descendants(self._launcher)
                kill([self._launcher, *self._started])
                self._launcher.communicate()
            self._temporary.cleanup()

    @property
    def lines(self) -> tuple[Any, ...]:
        """The lines that the first process has reported so far; an incomplete line does not count."""
        path = self.directory / "lines.0"
        text = path.read_text() if path.exists() else ""
        return tuple(json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n"))

    @property
    def ended(self) -> bool:
        """Whether all processes have succeeded. They report this themselves, since the launcher takes seconds to notice."""
        return len(list(self.directory.glob("done.*"))) == self.count

    def check(self) -> None:
        """Raises TunerError, with the end of a log, if a process has failed or the time limit has passed."""
        code = None
        if self._launcher is not None:
            self._started |= descendants(self._launcher)
            code = self._launcher.poll()
        if code is not None and not self.ended:
            raise self._error(f"a process of {self.what} failed (exit code {code})")
        if time.monotonic() > self._deadline:
            raise self._error(f"{self.what} did not end within {self.timeout:g} s and was stopped")

    def _error(self, what: str) -> TunerError:
        return TunerError(f"{what} after {len(self.lines)} of {self.expected} {self.unit}.{self._log_tail()}")

    def _log_tail(self) -> str:
        """The end of the most informative log: one with a traceback, else the first that is not empty."""
        logs = [*sorted(self.directory.glob("log/workerlog.*")), self.directory / "launch.log"]
        texts = {log.name: log.read_text(errors="replace").strip() for log in logs}
        said = [name for name, text in texts.items() if text]
        name = next((name for name in said if "Traceback" in texts[name]), said[0] if said else "")
        if not name:
            return " It left no log."
        lines = texts[name].splitlines()[-_LOG_LINES:]
        return f" The end of {name}:\n" + "\n".join(f"  {line}" for line in lines)


def _environment(processes: int, directory: str) -> dict[str, str]:
    """The environment of this process, without variables that another launcher may have set."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PADDLE_")}
    root = str(Path(__file__).parents[1])
    return kept | {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)),
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        # Processes keep the memory that they free. By default the C library returns large blocks at once, and requesting them
        # again costs several times as much as an elementwise op on them.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
        _WORKER: "1",
        "TMPDIR": directory,  # what a process that is killed leaves there goes with it
        "PYTHONSAFEPATH": "1",  # the modules beside the script are not top-level modules
    }
