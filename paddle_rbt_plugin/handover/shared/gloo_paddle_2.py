"""Communication between CPU processes in legacy programs of Paddle 2.6.

On CPUs its collectives support only the group of all processes, whatever their ring is. ``enable_static_training_on_cpu`` makes
sure that a plan has one active mesh axis, so that this is its only group.
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import paddle

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.patching import Attribute, Setting, on_cpu, paddle_change


def enable_on_cpu_of_paddle_2() -> None:
    """Connects all processes for the collectives of static programs; later calls do nothing.

    ``ProcessGroup.instantiate`` asserts a CUDA device, and ``init_parallel_env`` connects only dygraph: ``You must initialize
    the gloo environment first``. Paddle's ``gloo_init_parallel_env`` does the rest, but needs an address known to all, and
    starts its server in a separate process, which runs the training script again if processes are spawned."""
    paddle_2_communicates_through_gloo.install()
    if not _contexts:
        _contexts.append(_connect(paddle.distributed.get_rank(), paddle.distributed.get_world_size()))


@paddle_change(">=2.6,<3.0", lacking=on_cpu, permanent="the executor runs such programs until the job ends")
def paddle_2_communicates_through_gloo() -> Iterator[Setting]:
    """Makes legacy programs of Paddle 2.6 communicate between CPU processes.

    Reason: ``ProcessGroup.instantiate`` asserts a CUDA device, and only NCCL has the barrier used by programs.
    """
    from paddle.distributed.auto_parallel.static import process_group

    yield Attribute(process_group.ProcessGroup, "instantiate", _instantiate)
    yield Attribute(paddle._legacy_C_ops, "barrier", lambda *_: paddle.distributed.barrier())


def _instantiate(group: Any) -> None:
    group._is_instantiate = True


def _connect(rank: int, processes: int) -> Any:
    from paddle.base import core, dygraph

    server, host, port = None, "", 0
    if rank == 0:
        host, port = _address()
        server = _serve(port, processes)
    with dygraph.guard():
        host, port = _from_first(rank, host, port)
    try:
        strategy = core.GlooParallelStrategy()
        strategy.rank, strategy.rank_num = rank, processes
        strategy.ip_address, strategy.ip_port = host, port
        strategy.init_seconds, strategy.run_seconds = 600, 9999999
        context = core.GlooParallelContext(strategy)
        context.init()
        with dygraph.guard():  # all processes are connected before the server ends
            paddle.distributed.barrier()
    finally:
        if server is not None:
            server.kill()
            server.wait()
    return context


def _serve(port: int, processes: int) -> Any:
    """A process that runs the key-value server while the others connect, since connecting holds this process's interpreter
    lock. It ends with this process, when its input is closed."""
    spec = importlib.util.find_spec("paddle.distributed.fleet.utils.http_server")
    assert spec is not None and spec.origin is not None
    command = [sys.executable, "-c", _SERVER, spec.origin, str(port), str(processes)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return server
        time.sleep(0.1)
    raise TunerError(f"the server that connects the processes of this job cannot be reached on port {port} of this machine")


_SERVER = """
import runpy, sys
path, port, processes = sys.argv[1:]
runpy.run_path(path)["KVServer"](int(port), size={"_worker": int(processes)}).start()
sys.stdin.read()
"""


def _address() -> tuple[str, int]:
    """The address of the first process, with a free port."""
    host = paddle.distributed.ParallelEnv().current_endpoint.split(":")[0] or "127.0.0.1"
    with socket.socket() as free:
        free.bind(("", 0))
        return host, int(free.getsockname()[1])


def _from_first(rank: int, host: str, port: int) -> tuple[str, int]:
    """The address of the first process, on all processes."""
    numbers = [*map(int, socket.inet_aton(socket.gethostbyname(host)) if rank == 0 else bytes(4)), port]
    told = paddle.to_tensor(numbers, dtype="int64")
    paddle.distributed.broadcast(told, src=0)
    *address, port = (int(n) for n in told.numpy())
    return socket.inet_ntoa(bytes(address)), port


_contexts: list[Any] = []
"""The object that keeps the processes connected; created once per process."""
