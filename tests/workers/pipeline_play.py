"""Plays the jobs of all ranks of a pipeline in one process, as strictly as GPUs may run them.

A rank issues the ops of its jobs in order, each to a stream: that which Paddle's schedule names, or the one for computing. An
op starts when all before it on its stream have ended, those of its job that make what it reads on other streams, and, across
jobs, the op that recorded the event which it waits for. A send ends only when its receive runs, as with NCCL's large messages,
and a collective when all ranks of its group are there. Computing goes first wherever it can, so that an op which does not wait
for a message that it reads is found.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import paddle
from paddle.distributed.auto_parallel.static import process_group
from paddle.distributed.auto_parallel.static.reshard_funcs.same_status_reshard_func import SameStatusReshardFunction

from paddle_rbt_plugin.handover.pir import chunks

KINDS = {"pd_op.send_v2": "send", "pd_op.recv_v2": "receive"}
SINKS = ("builtin.shadow_output", "pd_op.set_persistable_value")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_LEAVES = ("builtin.parameter", "pd_op.data")
_GROUPS: dict[int, dict[int, Any]] = {}
"""The communicators of every rank, by number."""

Act = Callable[[int, Any, Any, Any], Any]


@dataclass
class Step:
    """An op of a job's program; positions are those of other steps in the program."""

    op: Any
    kind: str
    stream: str
    reads: list[int] = field(default_factory=list)
    """What makes its operands on other streams."""
    named: list[str] = field(default_factory=list)
    """Operands that other jobs make."""
    sinks: list[Any] = field(default_factory=list)
    """Ops that give its results names, which other jobs read."""
    awaited: tuple[str, ...] = ()
    event: str = ""
    group: tuple[Any, ...] = ()
    """Of a collective, number and ranks of its communicator; of a message, number, sender and receiver."""


@dataclass(eq=False)
class Task:
    """A step of one job of a rank."""

    rank: int
    job: Any
    step: Step
    waits: list[Task]
    is_done: bool = False

    @property
    def is_ready(self) -> bool:
        return all(task.is_done for task in self.waits)

    def __str__(self) -> str:
        what = f"{self.step.op.name()} {self.step.group}" if self.step.group else self.step.op.name()
        return f"rank {self.rank}, {self.job.type()} of micro batch {self.job.micro_batch_id()}, {self.step.stream}: {what}"


def play(plans: Mapping[int, Any], act: Act, collect: Callable[[list[Any]], None] | None = None) -> int:
    """Runs Paddle's job plans by rank; returns how many messages were sent. ``act`` is called with rank, job, op, and the
    message that a receive gets; what it returns for a send is the message. ``collect`` is called with a rank, job and op for
    each rank of a collective.

    Raises AssertionError where ranks wait for each other, and where an op reads what has not come yet."""
    return _Play(plans, act, collect).run()


class _Play:
    def __init__(self, plans: Mapping[int, Any], act: Act, collect: Callable[[list[Any]], None] | None):
        self.act, self.collect = act, collect
        self.queues: dict[tuple[int, str], deque[Task]] = defaultdict(deque)
        self.ranks = tuple(plans)
        self.made: set[tuple[int, int, str]] = set()
        """The names that have been given on a rank, by micro batch."""
        self.given: dict[int, set[str]] = {}
        """The names that jobs of a rank give."""
        for rank, plan in plans.items():
            self._issue(rank, plan)

    def _issue(self, rank: int, plan: Any) -> None:
        programs = {job.type(): job for job in plan.job_list()}
        steps = {type_: steps_of(rank, plan.ir_program(type_)) for type_ in programs}
        self.given[rank] = {sink.attrs()["output_name"] for s in steps.values() for step in s for sink in step.sinks}
        recorded: dict[str, Task] = {}
        for job in plan.job_list():
            tasks: list[Task] = []
            for step in steps[job.type()]:
                waits = [tasks[i] for i in step.reads] + [recorded[event] for event in step.awaited]
                tasks.append(Task(rank, job, step, waits))
                self.queues[rank, step.stream].append(tasks[-1])
                if step.event:
                    recorded[step.event] = tasks[-1]

    def run(self) -> int:
        sent, moving = 0, True
        while moving:
            moving = sum(map(self._compute, self.queues.values())) > 0
            if not moving:
                for queue in self.queues.values():
                    kind = queue[0].step.kind if queue else ""
                    if kind == "send" and self._send(queue):
                        sent, moving = sent + 1, True
                    elif kind == "collective" and self._collective(queue):
                        moving = True
        waiting = [str(queue[0]) for queue in self.queues.values() if queue and queue[0].step.kind != "compute"]
        assert not any(self.queues.values()), "ranks wait for each other:\n" + "\n".join(waiting)
        return sent

    def _compute(self, queue: deque[Task]) -> bool:
        moved = False
        while queue and queue[0].step.kind == "compute" and queue[0].is_ready:
            self._done(queue, None)
            moved = True
        return moved

    def _send(self, queue: deque[Task]) -> bool:
        task = queue[0]
        other = self._at_head(task.step.group[2], "receive", task.step.group)
        if other is None or not task.is_ready:
            return False
        self._done(other, self._done(queue, None))
        return True

    def _collective(self, queue: deque[Task]) -> bool:
        group = queue[0].step.group
        heads = [self._at_head(rank, "collective", group) for rank in group[1]]
        if None in heads:
            return False
        tasks = [head[0] for head in heads if head is not None]
        alike = {(t.job.type(), t.job.micro_batch_id(), t.step.op.name(), str(t.step.op.result(0).shape)) for t in tasks}
        assert len(alike) == 1, f"ranks {group[1]} meet in different collectives: {alike}"
        if self.collect is not None:
            self.collect([(t.rank, t.job, t.step.op) for t in tasks])
        for head in heads:
            self._done(head, None, acts=False)
        return True

    def _at_head(self, rank: int, kind: str, group: tuple[Any, ...]) -> deque[Task] | None:
        for (owner, _), queue in self.queues.items():
            if owner == rank and queue and queue[0].step.kind == kind and queue[0].step.group == group and queue[0].is_ready:
                return queue
        return None

    def _done(self, queue: deque[Task] | None, message: Any, acts: bool = True) -> Any:
        assert queue is not None
        task = queue.popleft()
        micro_batch = task.job.micro_batch_id()
        for name in task.step.named:
            has_come = (task.rank, micro_batch, name) in self.made or name not in self.given[task.rank]
            assert has_come, f"{task} reads {name}, which has not come yet"
        result = self.act(task.rank, task.job, task.step.op, message) if acts else None
        for sink in task.step.sinks:
            self.act(task.rank, task.job, sink, None)
            self.made.add((task.rank, micro_batch, sink.attrs()["output_name"]))
        task.is_done = True
        return result


def steps_of(rank: int, program: Any) -> list[Step]:
    """The steps of a job's program on a rank."""
    arguments = {value.id: name for name, value in program.global_block().kwargs().items()}
    position: dict[int, int] = {}
    steps: list[Step] = []
    for op in program.global_block().ops:
        makers = [value.get_defining_op() for value in op.operands_source() if value.initialized()]
        if op.name() in SINKS and makers[0] is not None:
            steps[position[makers[0].id()]].sinks.append(op)
            continue
        attrs = op.attrs()
        # Parameters and what is fed are there when a job begins; the others run where their schedule says.
        stream = "leaves" if op.name() in _LEAVES else attrs.get("execution_stream") or "computing"
        step = Step(op, KINDS.get(op.name(), "compute"), stream, event=attrs.get("event_to_record", ""))
        step.awaited = tuple(attrs.get("events_to_wait", ()))
        before = [position[maker.id()] for maker in makers if maker is not None]
        step.reads = [i for i in before if steps[i].stream != stream]
        step.named = [arguments[v.id] for v in op.operands_source() if v.initialized() and v.get_defining_op() is None]
        if step.kind != "compute":
            ends = (rank, peer(rank, op)) if step.kind == "send" else (peer(rank, op), rank)
            step.group = (attrs["ring_id"], *ends)
        elif "ring_id" in attrs and not op.name().endswith(("_grad", "_grad_")):
            ranks = tuple(_GROUPS[rank][attrs["ring_id"]].ranks)
            if len(ranks) > 1 or op.name().removeprefix("pd_op.").removesuffix("_") in COLLECTIVES:
                step.kind, step.group = "collective", (attrs["ring_id"], ranks)
        position[op.id()] = len(steps)
        steps.append(step)
    return steps


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
    numbers: Iterator[int] = iter(range(10**6))

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


def forget() -> None:
    """Forgets the communicators: other ranks play next."""
    _GROUPS.clear()


def peer(rank: int, op: Any) -> int:
    """The rank at the other end: an op names its place in the group."""
    return int(_GROUPS[rank][op.attrs()["ring_id"]].ranks[op.attrs()["peer"]])
