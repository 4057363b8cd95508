"""Starts scripts of tests/workers in one or several CPU processes."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
WORKERS = TESTS / "workers"


def launch(script: str, processes: int, out: Path, *args: str, timeout: float = 300, fresh: bool = False) -> Any:
    """Runs a worker script, which writes JSON to its last argument, and returns what it wrote.

    The processes are forked from one that has imported Paddle (``warm_workers``); ``fresh`` starts new interpreters instead,
    through ``paddle.distributed.launch``, for what depends on how a process starts."""
    _start(script, processes, out, args, timeout, fresh)
    assert out.exists(), f"{script} {args} wrote nothing"
    return json.loads(out.read_text())


def launch_all(script: str, processes: int, out: Path, *args: str, timeout: float = 300, fresh: bool = False) -> list[Any]:
    """Runs a worker script of which every rank writes JSON to its last argument and ``.RANK``; returns that by rank."""
    _start(script, processes, out, args, timeout, fresh)
    return [json.loads(out.with_name(f"{out.name}.{rank}").read_text()) for rank in range(processes)]


def run(script: str, folder: Path, *args: str, timeout: float = 900, **environment: str) -> tuple[int, str]:
    """Runs a worker script in one process, and returns its exit code and what it printed."""
    log = folder / "printed"
    (code,) = _warm(script, folder, args, [{**os.environ, **environment}], [log], timeout)
    return code, log.read_text(errors="replace")


def reported(script: str, folder: Path, *args: str, timeout: float = 900, **environment: str) -> Any:
    """Runs a worker script in one process, and returns the JSON that it printed behind ``REPORT``."""
    code, printed = run(script, folder, *args, timeout=timeout, **environment)
    assert code == 0, f"{script} {args} failed:\n{printed[-3000:]}"
    return json.loads(next(line for line in printed.splitlines() if line.startswith("REPORT")).removeprefix("REPORT"))


def _start(script: str, processes: int, out: Path, args: tuple[str, ...], timeout: float, fresh: bool) -> None:
    folder, args = out.parent, (*args, str(out))
    log = folder / "log"
    log.mkdir(exist_ok=True)
    if fresh:
        failed = _fresh(script, processes, folder, args, timeout)
    else:
        environments = _ranks(processes) if processes > 1 else [dict(os.environ)]
        logs = [log / f"workerlog.{rank}" for rank in range(processes)]
        failed = any(_warm(script, folder, args, environments, logs, timeout))
    logs_end = "\n".join(p.read_text(errors="replace")[-3000:] for p in sorted(log.glob("*log*")))
    assert not failed, f"{script} {args} failed:\n{logs_end}"


def _fresh(script: str, processes: int, folder: Path, args: tuple[str, ...], timeout: float) -> bool:
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "paddle.distributed.launch", "--nproc_per_node", str(processes), "--backend", "gloo"]
        command += ["--log_dir", str(folder / "log")]
    with (folder / "log" / "launcher.log").open("wb") as log:
        done = subprocess.run(
            [*command, str(WORKERS / script), *args], stdout=log, stderr=log, timeout=timeout, cwd=folder, check=False
        )
    return done.returncode != 0


def _ranks(processes: int) -> list[dict[str, str]]:
    """The environments that ``paddle.distributed.launch`` would give to the processes of a job on this machine."""
    with_ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(processes + 1)]
    master, *endpoints = [f"127.0.0.1:{server.getsockname()[1]}" for server in with_ports]
    for server in with_ports:
        server.close()
    job = {
        "PADDLE_MASTER": master,
        "PADDLE_NNODES": "1",
        "PADDLE_GLOBAL_SIZE": str(processes),
        "PADDLE_LOCAL_SIZE": str(processes),
        "PADDLE_TRAINERS_NUM": str(processes),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_DISTRI_BACKEND": "gloo",
    }
    return [
        {
            **os.environ,
            **job,
            "PADDLE_CURRENT_ENDPOINT": endpoint,
            **dict.fromkeys(("PADDLE_TRAINER_ID", "PADDLE_GLOBAL_RANK", "PADDLE_LOCAL_RANK", "PADDLE_RANK_IN_NODE"), str(rank)),
        }
        for rank, endpoint in enumerate(endpoints)
    ]


def _warm(
    script: str, folder: Path, args: tuple[str, ...], environments: list[dict[str, str]], logs: list[Path], timeout: float
) -> list[int]:
    """The exit codes of workers forked from the process that has imported Paddle."""
    request = {
        "script": str(WORKERS / script),
        "arguments": args,
        "folder": str(folder),
        "environments": environments,
        "logs": [str(log) for log in logs],
    }
    server = _server()
    server.stdin.write(json.dumps(request).encode() + b"\n")
    server.stdin.flush()
    if not select.select([server.stdout], [], [], timeout)[0]:
        _end(server)
        ends = "\n".join(log.read_text(errors="replace")[-3000:] for log in logs if log.exists())
        raise TimeoutError(f"{script} {args} did not end within {timeout:g} s:\n{ends}")
    line = server.stdout.readline()
    assert line, "the process that forks the workers has died"
    return json.loads(line)


@cache
def _server() -> Any:
    """The process that forks the workers of this run of tests."""
    # One thread per library: a fork has no others.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(TESTS / "warm_workers.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True,
    )  # fmt: skip
    atexit.register(_end, server)
    return server


def _end(server: Any) -> None:
    """Ends it with all its workers."""
    _server.cache_clear()
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
