"""A process that has imported Paddle and this package once, and forks a worker for every script that it is asked to run.

Importing takes longer than what most scripts of tests/workers do. A forked worker starts where a new interpreter would be after
its imports: with its own arguments, environment, folder, log and random numbers. ``launching`` starts this process, writes a
request per line to its standard input, as JSON, and reads one line back: the exit codes of the workers, in order. All workers
end with the first that fails, and with this process, which ends when its standard input does.

    {"script": ..., "arguments": [...], "folder": ..., "environments": [{...}, ...], "logs": [...]}
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import runpy
import select
import signal
import sys
import traceback
import warnings
from typing import Any


def serve(replies: Any) -> None:
    """Runs what is asked for until nobody can ask any more."""
    while line := sys.stdin.buffer.raw.readline():  # type: ignore[attr-defined]
        request = json.loads(line)
        workers = [fork(request, rank) for rank in range(len(request["environments"]))]
        replies.write(json.dumps(wait_for(workers)) + "\n")
        replies.flush()


def fork(request: dict[str, Any], rank: int) -> int:
    """The process id of a new worker."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = work(request, rank)
        finally:
            os._exit(code)
    return pid


def work(request: dict[str, Any], rank: int) -> int:
    """Runs the script as the interpreter would, and returns the exit code."""
    with open(request["logs"][rank], "wb", 0) as log, open(os.devnull, "rb", 0) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["environments"][rank])
    os.chdir(request["folder"])
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in before]
    sys.path[:0] = [os.path.dirname(request["script"]), *added]
    sys.argv = [request["script"], *request["arguments"]]
    draw_anew()
    try:
        runpy.run_path(request["script"], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def draw_anew() -> None:
    """Random numbers as in a process of its own: no two start alike."""
    random.seed()
    np.random.seed()
    paddle.framework.core.default_cpu_generator().seed()


def wait_for(workers: list[int]) -> list[int]:
    """The exit codes of all; the first that fails ends the others, as does the end of standard input."""
    codes: dict[int, int] = {}
    running = {os.pidfd_open(pid): pid for pid in workers}
    while running:
        ready, _, _ = select.select([0, *running], [], [])
        for end in set(ready) & running.keys():
            pid = running.pop(end)
            os.close(end)
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if any(codes.values()) or 0 in ready:
            for pid in running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return [codes[pid] for pid in workers]


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    import numpy as np
    import paddle

    import paddle_rbt_plugin  # noqa: F401

    sys.path.pop(0)  # the folder of this script
    serve(answers)
