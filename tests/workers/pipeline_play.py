"""Plays the jobs of all ranks of a pipeline in one process.

Every rank runs its ops in the order of its jobs; a send puts a message on its communicator and goes on, a receive waits for the
next message there. That is stricter than a GPU, where only what reads a message waits for it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import paddle
from paddle.distributed.auto_parallel.static import process_group
from paddle.distributed.auto_parallel.static.reshard_funcs.same_status_reshard_func import SameStatusReshardFunction

from paddle_rbt_plugin.handover import chunks

KINDS = {"pd_op.send_v2": "send", "pd_op.recv_v2": "receive"}
_GROUPS: dict[int, dict[int, Any]] = {}
"""The communicators of every rank, by number."""


def play(plans: Mapping[int, Any], act: Callable[[int, Any, Any, Any], Any]) -> int:
    """Runs Paddle's job plans by rank; returns how many messages were sent. ``act`` is called with rank, job, op, and the
    message that a receive gets; what it returns for a send is the message.

    Raises AssertionError where ranks wait for each other, and for messages that nobody receives."""
    channels: dict[tuple[int, int, int], deque] = defaultdict(deque)
    waiting: dict[int, str] = {}
    done = sent = 0

    def run(rank: int, plan: Any) -> Iterator[None]:
        nonlocal done, sent
        for job in plan.job_list():
            for op in plan.ir_program(job.type()).global_block().ops:
                kind, message = KINDS.get(op.name()), None
                if kind == "receive":
                    channel = channels[op.attrs()["ring_id"], peer(rank, op), rank]
                    while not channel:
                        waiting[rank] = f"for rank {peer(rank, op)} in {job.type()} of micro batch {job.micro_batch_id()}"
                        yield
                    message = channel.popleft()
                result = act(rank, job, op, message)
                if kind == "send":
                    channels[op.attrs()["ring_id"], rank, peer(rank, op)].append(result)
                    sent += 1
                done += 1

    running = {rank: run(rank, plan) for rank, plan in plans.items()}
    while running:
        before = done
        running = {rank: ops for rank, ops in running.items() if next(ops, done) is None}
        assert done > before or not running, f"ranks wait for each other: {waiting}"
    left = {key: len(channel) for key, channel in channels.items() if channel}
    assert not left, f"messages that nobody receives, by communicator, sender and receiver: {left}"
    return sent


def check_message(_: int, job: Any, op: Any, message: Any) -> Any:
    """An ``act`` that checks that a receive gets what it is for, in shape, type, value and micro batch."""
    kind = KINDS.get(op.name())
    if kind is None:
        return None
    value = op.operand_source(0) if kind == "send" else op.result(0)
    expected = [list(value.shape), str(value.dtype), op.attrs()["reshard"], job.micro_batch_id()]
    assert kind == "send" or message == expected, f"{job.type()} gets {message} for {expected}"
    return expected


def begin(rank: int) -> None:
    """To be called before a program of a rank is made: communicators are those that the process of the rank has, whose numbers
    its peers must give them as well, and sends and receives carry the number of their reshard, the same on every rank."""
    if rank not in _GROUPS:
        process_group.clear_all_process_groups()
        _GROUPS[rank] = process_group._g_process_group_map
    process_group._g_process_group_map = _GROUPS[rank]
    numbers = iter(range(10**6))

    def numbered(original: Any) -> Any:
        def reshard(*args: Any) -> Any:
            value = original(*args)
            point = paddle.base.libpaddle.pir.get_current_insertion_point()
            number = next(numbers)
            for _ in range(2):  # a receive is the last op; a send stands before the reshard that is left for the value
                point.prev()
                if point.get_operation().name() in KINDS:
                    point.get_operation().set_int_attr("reshard", number)
                    break
            return value

        reshard.original = original
        return reshard

    for owner, name in ((SameStatusReshardFunction, "reshard"), (chunks, "exchange")):
        current = getattr(owner, name)
        setattr(owner, name, numbered(getattr(current, "original", current)))


def peer(rank: int, op: Any) -> int:
    """The rank at the other end: an op names its place in the group."""
    return int(_GROUPS[rank][op.attrs()["ring_id"]].ranks[op.attrs()["peer"]])
