"""Trains one step under a pipeline, all ranks in this process, and the same step serially.

Static sends and receives do not run on CPUs. So the jobs of all ranks are played against each other: what a rank computes
between messages or collectives is executed as a program of its own, a receive gets what its send has, and a collective what it
computes. Prints JSON: the losses of the micro batches, how far each parameter moves serially, and how far from there it ends
under the pipeline, on the rank where it is farthest.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
from paddle.distributed import ReduceOp
from pipeline_engine import BATCH, STEPS, build_model, config_of, prepared, steps_for
from pipeline_play import KINDS, SINKS, play

from paddle_rbt_plugin.graph.pir import dtype_name
from paddle_rbt_plugin.handover.pir.replay import LEAVES
from paddle_rbt_plugin.models import input_spec

RATE = 1.0
"""Of plain gradient descent, under which a parameter moves by its gradient."""
BEGINNING = {"moment": 0.0, "velocity": 0.0, "beta1_pow": 0.9, "beta2_pow": 0.999}
"""What states begin with, by a part of their names."""


@dataclass
class JobRun:
    """Ops of one job of a rank that run together."""

    job: Any
    ops: list[Any] = field(default_factory=list)
    sinks: list[Any] = field(default_factory=list)


class Ranks:
    """What all ranks hold, and what they do with it.

    ``begin`` gives what an input, a parameter or a state of a rank begins with, by rank, name and micro batch (None for all but
    inputs, which are those called ``inputs``)."""

    def __init__(self, inputs: list[str], begin: Callable[[int, str, int | None], Any]):
        self.inputs, self.begin = inputs, begin
        self.named: dict[tuple[int, str, int | None], Any] = {}
        """Arrays by rank, name and, where they are of one, micro batch."""
        self.made: dict[tuple[int, str, int], dict[int, Any]] = {}
        """Arrays that a job of a rank has made, by their values' ids; a string is the name of one that all jobs see."""
        self.waiting: dict[int, JobRun] = {}
        self.programs: dict[Any, Any] = {}
        self.executor = paddle.static.Executor(paddle.CPUPlace())

    def act(self, rank: int, job: Any, op: Any, message: Any) -> Any:
        """Does what a rank does; see ``play``."""
        run = self.waiting.get(rank)
        if run is None or run.job is not job:
            self.flush(rank)
            run = self.waiting[rank] = JobRun(job)
        kind, made = KINDS.get(op.name()), self._made(rank, job)
        if kind == "send":
            self.flush(rank)
            return self._value(rank, job, op.operand_source(0))
        if kind == "receive":
            made[op.result(0).id] = message
        elif op.name() in LEAVES:
            made[op.result(0).id] = op.attrs()[LEAVES[op.name()]]
        elif op.name() in SINKS:
            run.sinks.append(op)
        else:
            run.ops.append(op)
        return None

    def collect(self, tasks: list[Any]) -> None:
        """Computes what the ranks of a collective get; see ``play``."""
        for rank, _, _ in tasks:
            self.flush(rank)
        values = [self._value(rank, job, op.operand_source(0)) for rank, job, op in tasks]
        for (rank, job, op), result in zip(tasks, collective(tasks[0][2], values), strict=True):
            self._made(rank, job)[op.result(0).id] = result

    def flush(self, rank: int) -> None:
        """Executes what a rank has to do so far."""
        run = self.waiting.pop(rank, None)
        if run is None:
            return
        made = self._made(rank, run.job)
        if run.ops:
            key = (rank, run.job.type(), run.ops[0].id(), run.ops[-1].id())
            if key not in self.programs:
                self.programs[key] = program_of(run.ops)
            program, read, written, changed = self.programs[key]
            feed = {f"x{i}": self._value(rank, run.job, value) for i, value in enumerate(read)}
            found = self.executor.run(program, feed=feed, fetch_list=[value for _, value in written])
            made.update((value.id, array) for (value, _), array in zip(written, found, strict=True))
            for value, result in changed:
                self._set(rank, run.job, value, made[result.id])
        for op in run.sinks:
            self.named[rank, op.attrs()["output_name"], run.job.micro_batch_id()] = made[op.operand_source(0).id]

    def _made(self, rank: int, job: Any) -> dict[int, Any]:
        return self.made.setdefault((rank, job.type(), job.micro_batch_id()), {})

    def _name(self, rank: int, job: Any, value: Any) -> str | None:
        if value.get_defining_op() is None:
            return str(value.name)
        found = self._made(rank, job).get(value.id)
        return found if isinstance(found, str) else None

    def _key(self, rank: int, job: Any, name: str) -> tuple[int, str, int | None]:
        of_micro_batch = (rank, name, job.micro_batch_id())
        return of_micro_batch if of_micro_batch in self.named or name in self.inputs else (rank, name, None)

    def _value(self, rank: int, job: Any, value: Any) -> Any:
        name = self._name(rank, job, value)
        if name is None:
            return self._made(rank, job)[value.id]
        key = self._key(rank, job, name)
        if key not in self.named:
            is_sum = name.endswith("@GRAD@MERGE")
            self.named[key] = np.zeros(value.shape, dtype_name(value.dtype)) if is_sum else self.begin(*key)
        return self.named[key]

    def _set(self, rank: int, job: Any, value: Any, array: Any) -> None:
        name = self._name(rank, job, value)
        if name is not None:
            self.named[self._key(rank, job, name)] = array


def program_of(ops: list[Any]) -> tuple[Any, list[Any], list[Any], list[Any]]:
    """A program that does what ``ops`` do, the values that it reads, those that it makes for others, each beside the program's
    own, and what it changes in place, with the result that holds the change."""
    program, mapping = paddle.static.Program(), paddle.pir.IrMapping()
    mine = {op.id() for op in ops}
    read: list[Any] = []
    known: set[int] = set()
    written, changed = [], []

    def copy(op: Any) -> None:
        for value in op.operands_source():
            if not value.initialized() or value.id in known:
                continue
            maker = value.get_defining_op()
            if maker is not None and maker.name() == "builtin.combine" and maker.id() not in mine:
                copy(maker)  # a list is no array
            elif maker is None or maker.id() not in mine:
                known.add(value.id)
                mapping.add(value, paddle.static.data(f"x{len(read)}", value.shape, value.dtype))
                read.append(value)
        new = op.clone(mapping, paddle.pir.CloneOptions(False, True, True))
        if new.has_attr("events_to_wait"):  # that a receive has come, which is no op here
            new.set_str_array_attr("events_to_wait", [])
        known.update(value.id for value in op.results() if value.initialized())

    with paddle.static.program_guard(program, paddle.static.Program()):
        for op in ops:
            copy(op)
        for op in ops:
            in_place = paddle.core.pir.get_op_inplace_info(op)
            for i, value in enumerate(op.results()):
                if not value.initialized() or value.is_combine():
                    continue
                is_read = any(user.id() not in mine or user.name() in SINKS for user in value.all_used_ops())
                operand = op.operand_source(in_place[i]) if i in in_place else None
                if operand is not None and operand.initialized():
                    changed.append((operand, value))
                if is_read or operand is not None:
                    written.append((value, mapping.look_up(value)))
    return program, read, written, changed


def collective(op: Any, values: list[Any]) -> list[Any]:
    """What each of the ranks gets of a collective."""
    kind, n = op.name().removeprefix("pd_op.").removesuffix("_"), len(values)
    if kind in ("all_reduce", "reduce_scatter"):
        how = op.attrs().get("reduce_type", ReduceOp.SUM)
        names = {ReduceOp.SUM: "sum", ReduceOp.AVG: "mean", ReduceOp.MAX: "max", ReduceOp.MIN: "min", ReduceOp.PROD: "prod"}
        total = getattr(np, names[how])(np.stack(values), 0)
        return np.split(total, n) if kind == "reduce_scatter" else [total] * n
    if kind == "all_gather":
        return [np.concatenate(values)] * n
    assert kind == "all_to_all", f"{kind} is not played"
    parts = [np.split(value, n) for value in values]
    return [np.concatenate([part[i] for part in parts]) for i in range(n)]


def part_of(array: Any, value: Any, rank: int) -> Any:
    """The part of an array that a rank holds, as the value of a distributed program lies."""
    mesh = value.dist_attr().process_mesh
    place = np.unravel_index(mesh.process_ids.index(rank), mesh.shape)
    for dim, axis in enumerate(value.dist_attr().dims_mapping):
        if axis >= 0:
            array = np.split(array, mesh.shape[axis], dim)[place[axis]]
    return array


def pipelined(
    model: str, settings: tuple[Any, ...], batches: list[list[Any]], values: dict[str, Any], optimizer: Any, rate: float
) -> Any:
    """The losses, and the parameters by name, after a step of all ranks that begins with ``values``: what they are on each
    rank, beside the part of the rank of what they should be."""
    space, ranks, schedule = settings
    engines = {rank: prepared(rank, model, space, ranks, schedule, "float32", optimizer, len(batches)) for rank in range(ranks)}
    inputs = engines[0].get_feed_name_list()
    lying = {
        (rank, op.result(0).name): op.result(0)
        for rank, engine in engines.items()
        for op in engine._pir_dist_main_progs["train"].global_block().ops
        if op.name() in LEAVES
    }

    def begin(rank: int, name: str, micro_batch: int | None) -> Any:
        if micro_batch is not None:
            return part_of(batches[micro_batch][inputs.index(name)], lying[rank, name], rank)
        if name in values:
            return part_of(values[name], lying[rank, name], rank)
        if name.startswith("learning_rate"):
            return np.float32(rate)
        first = next(number for part, number in BEGINNING.items() if part in name)
        return np.full(lying[rank, name]._local_shape, first, "float32")

    paddle.enable_static()
    played = Ranks(inputs, begin)
    sent = play({rank: engine._job_plan for rank, engine in engines.items()}, played.act, played.collect)
    for rank in engines:
        played.flush(rank)
    loss = engines[0]._loss_names[0]
    losses = {(rank, step): float(found) for (rank, name, step), found in played.named.items() if name == loss}
    states = {(rank, name): found for (rank, name, step), found in played.named.items() if step is None}
    return losses, states, lying, sent


def serial(model: str, batches: list[list[Any]], optimizer: Any, rate: float) -> Any:
    """The losses, and the parameters by name before and after the same step."""
    paddle.disable_static()
    with paddle.utils.unique_name.guard():
        paddle.seed(0)
        layer = build_model(model)
    before = {p.name: p.numpy() for p in layer.parameters()}
    losses = [layer(*map(paddle.to_tensor, arrays)) for arrays in batches]
    paddle.add_n(losses).scale(1 / len(losses)).backward()
    optimizer(rate, parameters=layer.parameters()).step()
    return [float(loss) for loss in losses], before, {p.name: p.numpy() for p in layer.parameters()}


def optimizer_of(kind: str, clip: float | None) -> tuple[Any, float]:
    """What makes an optimizer of a rate and parameters, and the rate of a step."""

    def make(rate: float, parameters: Any) -> Any:
        more = {"grad_clip": paddle.nn.ClipGradByGlobalNorm(clip)} if clip else {}
        if kind == "adamw":  # its first step is by signs; a large epsilon makes it one by the gradients
            return paddle.optimizer.AdamW(rate, parameters=parameters, epsilon=0.1, weight_decay=0.1, **more)
        return getattr(paddle.optimizer, {"sgd": "SGD", "momentum": "Momentum"}[kind])(rate, parameters=parameters, **more)

    return make, 0.1 if kind == "adamw" else RATE


def compared(
    model: str,
    space: dict[str, Any],
    ranks: int,
    schedule: str,
    steps: int | None = None,
    kind: str = "sgd",
    clip: float | None = None,
) -> dict[str, Any]:
    """The report of a step; ``clip`` is the largest norm of the gradients."""
    steps = steps or steps_for(space["pp"])
    rng = np.random.default_rng(0)
    specs = input_spec(config_of(model), BATCH // STEPS)
    batches = [[inputs_like(spec, rng) for spec in specs] for _ in range(steps)]
    optimizer, rate = optimizer_of(kind, clip)
    expected, before, after = serial(model, batches, optimizer, rate)
    losses, states, lying, sent = pipelined(model, (space, ranks, schedule), batches, before, optimizer, rate)
    last = [rank for rank, micro_batch in losses if micro_batch == 0]
    differ = dict.fromkeys(after, 0.0)
    parameters = {key: value for key, value in states.items() if key[1] in after}
    for (rank, name), value in parameters.items():
        differ[name] = max(differ[name], float(abs(part_of(after[name], lying[rank, name], rank) - value).max()))
    assert {name for _, name in parameters} == set(after), "not every parameter was updated"
    return {
        "losses": [losses[last[0], step] for step in range(steps)],
        "loss_on_ranks": max(abs(losses[rank, step] - expected[step]) for rank in last for step in range(steps)),
        "serial_losses": expected,
        "moved": {name: float(abs(after[name] - before[name]).max()) for name in after},
        "differ": differ,
        "ulp": {name: float(np.spacing(abs(after[name]).max())) for name in after},
        "apart": apart(states, lying),
        "messages": sent,
    }


def inputs_like(spec: Any, rng: Any) -> Any:
    """Values of an input: tokens, or small numbers of which a mask may consist."""
    return rng.integers(0, 16 if "int" in dtype_name(spec.dtype) else 2, spec.shape).astype(dtype_name(spec.dtype))


def apart(states: dict[Any, Any], lying: dict[Any, Any]) -> float:
    """The largest difference between ranks that hold the same part of a parameter or of a state of its update."""
    held: dict[Any, list[Any]] = {}
    for (rank, name), value in states.items():
        if (rank, name) in lying:
            attr = lying[rank, name].dist_attr()
            place = np.unravel_index(attr.process_mesh.process_ids.index(rank), attr.process_mesh.shape)
            held.setdefault((name, *(int(place[axis]) for axis in attr.dims_mapping if axis >= 0)), []).append(value)
    return max(
        float(abs(value - values[0]).max()) for values in held.values() for value in values if not math.isnan(value.sum())
    )


def main(model: str, space: dict[str, Any], ranks: int, schedule: str) -> None:
    print("REPORT" + json.dumps(compared(model, space, ranks, schedule)))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
