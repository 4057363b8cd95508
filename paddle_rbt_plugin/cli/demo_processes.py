"""The processes of the demo: started through ``paddle.distributed.launch``, watched, and ended with all they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from paddle_rbt_plugin.cli import demo_training
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.plan.plan import Plan

_LOG_LINES = 15


class Processes:
    """Trains under a plan with one process per device, inside a ``with`` block that none of them outlives.

    ``timeout`` is the number of seconds that they may take together."""

    def __init__(self, plan: Plan, way: str, steps: int, timeout: int):
        self.steps, self.timeout = steps, timeout
        self.count = len(plan.stages[0].devices)
        self._deadline = time.monotonic() + timeout
        self._temporary = tempfile.TemporaryDirectory(prefix="paddle-rbt-demo-")
        self._directory = Path(self._temporary.name)
        plan.save(self._directory / "plan.json")
        command = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(self.count)]
        command += ["--backend", "gloo", "--log_dir", str(self._directory / "log")]
        command += [demo_training.__file__, way, str(self._directory), str(steps)]
        with (self._directory / "launch.log").open("wb") as log:
            # A session of its own, so that Ctrl-C reaches this process only, which then ends the others.
            self._launcher = subprocess.Popen(
                command, stdout=log, stderr=log, env=_environment(self.count, self._temporary.name), start_new_session=True
            )

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._launcher.kill()  # not SIGTERM: on that it dies without ending its processes
        self._launcher.wait()
        for path in self._directory.glob("pid.*"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        self._temporary.cleanup()

    @property
    def losses(self) -> tuple[float, ...]:
        """What the first process has written so far; a line that is still being written does not count."""
        path = self._directory / "losses"
        text = path.read_text() if path.exists() else ""
        return tuple(json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n"))

    @property
    def ended(self) -> bool:
        """All have ended well. They say so themselves, since the launcher takes seconds to notice."""
        return len(list(self._directory.glob("done.*"))) == self.count

    def check(self) -> None:
        """Raises TunerError, with the end of its log, where a process has failed, and where all take too long."""
        code = self._launcher.poll()
        if code is not None and not self.ended:
            raise self._error(f"a process of the demo failed (exit code {code})")
        if time.monotonic() > self._deadline:
            raise self._error(f"the demo did not end within {self.timeout} s and was stopped")

    def _error(self, what: str) -> TunerError:
        return TunerError(f"{what} after {len(self.losses)} of {self.steps} steps.{self._log_tail()}")

    def _log_tail(self) -> str:
        """The end of the log that says most: one with a traceback, else the first that is not empty."""
        logs = [*sorted(self._directory.glob("log/workerlog.*")), self._directory / "launch.log"]
        texts = {log.name: log.read_text(errors="replace").strip() for log in logs}
        said = [name for name, text in texts.items() if text]
        name = next((name for name in said if "Traceback" in texts[name]), said[0] if said else "")
        if not name:
            return " It left no log."
        lines = texts[name].splitlines()[-_LOG_LINES:]
        return f" The end of {name}:\n" + "\n".join(f"  {line}" for line in lines)


def _environment(processes: int, directory: str) -> dict[str, str]:
    """This process's environment, less what another launcher may have left in it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PADDLE_")}
    root = str(Path(__file__).parents[2])
    return kept | {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)),
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "TMPDIR": directory,  # what a process that is killed leaves there goes with it
        "PYTHONSAFEPATH": "1",  # the modules beside the script are not top-level modules
    }
