"""A process that trains cases, and the server that such processes are forked from.

    python -m random_models.worker SOCKET

imports everything and waits for lines on its standard input, each of which asks for one process of a job; a fork has all of
that imported already. A forked process connects to the socket, joins the others of its job, and answers each line (a case) by a
line; what it prints goes to the log. Arrays travel as files beside the log.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from typing import Any

_PR_SET_PDEATHSIG = 1


def serve(address: str) -> None:
    """Forks a process for every line on standard input, until that ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _load()
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            try:
                _work(address, asked)
            finally:
                os._exit(0)


def _load() -> None:
    warnings.simplefilter("ignore")
    import paddle

    import random_models.script

    paddle.set_device("cpu")
    assert random_models.script


def _work(address: str, asked: dict[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(asked["environment"])
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    lines = connection.makefile("rw", encoding="utf-8")

    def tell(value: Any) -> None:
        lines.write(json.dumps(value) + "\n")
        lines.flush()

    tell({"pool": asked["pool"], "rank": asked["rank"], "pid": os.getpid()})
    if asked["processes"] > 1:
        import paddle.distributed as dist

        dist.init_parallel_env()
    tell({"ready": True})
    for line in lines:
        case = json.loads(line)
        begin = time.monotonic()
        answer = _answer(case, asked)
        sys.stdout.flush()
        tell({**answer, "seconds": round(time.monotonic() - begin, 3)})


def _answer(case: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    import gc

    import numpy as np

    from paddle_rbt_plugin.errors import TunerError
    from random_models.script import train

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = train(case, alone=asked["processes"] == 1, fault=asked["fault"])
    except TunerError as error:
        return {"outcome": "refused", "type": type(error).__name__, "message": str(error)}
    except Exception as error:
        traceback.print_exc()
        text = traceback.format_exc()
        return {"outcome": "crash", "type": type(error).__name__, "message": str(error)[-2000:], "traceback": text[-4000:]}
    finally:
        gc.collect()
    path = f"{asked['log']}.{case['file']}.npz"
    keys = list(result.parts)
    arrays = {f"a{i}": result.parts[key].array for i, key in enumerate(keys)}
    arrays |= {f"b{i}": result.initial[key] for i, key in enumerate(keys) if key in result.initial}
    np.savez(path, **arrays)
    parts = [[key, result.parts[key].dims] for key in keys]
    return {"outcome": "trained", "losses": result.losses, "path": path, "parts": parts, "mesh": result.mesh}


if __name__ == "__main__":
    serve(sys.argv[1])
