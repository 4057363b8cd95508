"""Warm jobs of one, two and four processes that train cases, and are started again when one of them goes down.

``Jobs`` owns a server from which processes are forked (``worker``); ``Job`` is one group of them. Everything ends with the
``with`` block of ``Jobs``.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

BENCHMARKS = Path(__file__).parents[1]
GRACE = 8.0
"""Seconds that the other ranks have once one has failed: a common error reaches all of them at once, else they wait for it."""
LIFETIME = 150
"""Cases after which a job is started afresh: memory, and whatever Paddle keeps of programs."""


class Job:
    """The processes of one job, and what they have answered. ``run`` sends a case to all of them."""

    def __init__(self, jobs: Jobs, processes: int, kind: str):
        self.jobs, self.processes, self.kind, self.trained = jobs, processes, kind, 0
        self.number = jobs.next_number()
        self.running: list[psutil.Process] = []
        self.lines: list[Any] = []
        self.logs = [jobs.directory / f"log.{self.number}.{rank}" for rank in range(processes)]
        self._start()

    def _start(self) -> None:
        ports = _free_ports(self.processes)
        endpoints = [f"127.0.0.1:{port}" for port in ports]
        common = {
            "PADDLE_TRAINERS_NUM": str(self.processes),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_MASTER": endpoints[0],
            "PADDLE_DISTRI_BACKEND": "gloo",
        }
        for rank in range(self.processes):
            mine = {"PADDLE_TRAINER_ID": str(rank), "PADDLE_CURRENT_ENDPOINT": endpoints[rank]}
            environment = {**common, **mine} if self.processes > 1 else {}
            asked = {
                "pool": self.number,
                "rank": rank,
                "processes": self.processes,
                "environment": environment,
                "fault": self.jobs.fault,
            }
            self.jobs.fork({**asked, "log": str(self.logs[rank])})
        connected: dict[int, Any] = {}
        while len(connected) < self.processes:
            lines, hello = self.jobs.accept()
            if hello["pool"] == self.number:
                connected[hello["rank"]] = lines
                self.running.append(psutil.Process(hello["pid"]))
        self.lines = [connected[rank] for rank in range(self.processes)]
        answers = self._gather(60.0)
        if any(a is None for a in answers):
            self.end()
            raise RuntimeError(f"a job of {self.processes} processes did not start:\n{self.log_tail()}")

    def run(self, case: dict[str, Any], limit: float) -> dict[str, Any]:
        """``{"outcome": ..., "ranks": [answer or None, ...]}``; the outcome is trained, refused, crash or hang. After one of
        the last two the job has ended."""
        self.trained += 1
        for lines in self.lines:
            try:
                lines.send(json.dumps({**case, "file": self.trained}) + "\n")
            except OSError:
                break
        answers = self._gather(limit)
        outcomes = [a["outcome"] if a else None for a in answers]
        if all(o == "trained" for o in outcomes) or all(o == "refused" for o in outcomes):
            return {"outcome": outcomes[0], "ranks": answers}
        died = any(line.closed for line in self.lines)
        tail = self.log_tail()
        self.end()
        if "crash" in outcomes or died:
            outcome = "crash"
        elif "refused" in outcomes:
            outcome = "crash" if "trained" in outcomes else "refused" if None not in outcomes else "hang"
        else:
            outcome = "hang"
        return {"outcome": outcome, "ranks": answers, "died": died, "log": tail}

    def _gather(self, limit: float) -> list[dict[str, Any] | None]:
        answers: list[dict[str, Any] | None] = [None] * self.processes
        deadline = time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            for rank, lines in enumerate(self.lines):
                if early := lines.buffered():  # it came with the line before
                    answers[rank] = json.loads(early)
                selector.register(lines.socket, selectors.EVENT_READ, rank)
            while any(a is None for a in answers) and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    rank = key.data
                    line = self.lines[rank].receive()
                    if line is not None and line != "":
                        answers[rank] = json.loads(line)
                    if line == "" or (answers[rank] or {}).get("outcome") in ("crash", "refused"):
                        deadline = min(deadline, time.monotonic() + GRACE)
                    if line == "":
                        selector.unregister(key.fileobj)
                if not selector.get_map():
                    break
        return answers

    def log_tail(self, length: int = 1500) -> str:
        """The end of the logs of all ranks."""
        return "\n".join(log.read_text(errors="replace")[-length:] for log in self.logs if log.exists())

    def end(self) -> None:
        for process in self.running:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for lines in self.lines:
            lines.close()
        self.jobs.forget(self)


class _Lines:
    """Lines over a socket. ``receive`` answers None for half a line and an empty string at the end."""

    def __init__(self, connection: socket.socket):
        self.socket, self.buffer, self.closed = connection, b"", False

    def send(self, line: str) -> None:
        self.socket.sendall(line.encode())

    def buffered(self) -> str | None:
        return self.receive() if b"\n" in self.buffer else None

    def receive(self) -> str | None:
        if b"\n" not in self.buffer:
            try:
                more = self.socket.recv(1 << 20)
            except OSError:
                more = b""
            if not more:
                self.closed = True
                return ""
            self.buffer += more
        line, newline, rest = self.buffer.partition(b"\n")
        if not newline:
            return None
        self.buffer = rest
        return line.decode()

    def close(self) -> None:
        self.socket.close()


class Jobs:
    """Gives the job of so many processes that is running, or starts one. ``fault`` as in ``script.train``."""

    def __init__(self, fault: int | None = None):
        self.fault = fault
        self._temporary = tempfile.TemporaryDirectory(prefix="random-models-")
        self.directory = Path(self._temporary.name)
        self._running: dict[tuple[int, str], Job] = {}
        self._number = 0
        self.starts = 0

    def __enter__(self) -> Jobs:
        path = Path(self._temporary.name, "socket")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._listener.settimeout(60)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PADDLE_")}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOG_v": "0", "TMPDIR": self._temporary.name}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(BENCHMARKS), os.environ.get("PYTHONPATH"))))
        with (self.directory / "server.log").open("w") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "random_models.worker", str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=self._temporary.name,
            )
        if "ready" not in self._server.stdout.readline():
            raise RuntimeError(f"the server did not start:\n{(self.directory / 'server.log').read_text()[-2000:]}")
        return self

    def __exit__(self, *_: object) -> None:
        for job in list(self._running.values()):
            job.end()
        self._server.kill()
        self._server.communicate()
        self._listener.close()
        self._temporary.cleanup()

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def fork(self, asked: dict[str, Any]) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()

    def accept(self) -> tuple[_Lines, dict[str, Any]]:
        connection, _ = self._listener.accept()
        lines = _Lines(connection)
        while (line := lines.receive()) is None:
            pass
        return lines, json.loads(line)

    def job(self, processes: int, kind: str = "") -> Job:
        """``kind`` keeps jobs of one size apart: on CPUs the communicators of static programs and those of dygraph are found
        under the same numbers, so that a process which has trained in one way cannot train in the other."""
        job = self._running.get((processes, kind))
        if job is not None and job.trained >= LIFETIME:
            job.end()
            job = None
        if job is None:
            job = self._running[processes, kind] = Job(self, processes, kind)
            self.starts += 1
        return job

    def afresh(self) -> None:
        """Ends all jobs, so that the next cases meet processes that have trained nothing."""
        for job in list(self._running.values()):
            job.end()

    def forget(self, job: Job) -> None:
        if self._running.get((job.processes, job.kind)) is job:
            del self._running[job.processes, job.kind]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()
