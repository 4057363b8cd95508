"""Trains one step under a pipeline, all ranks in this process, and the same step serially.

Static sends and receives do not run on CPUs. So the jobs of all ranks are played against each other, every op that runs is
copied into one program, where a send and its receive are one value and a collective is what it computes, and that program is
executed. Prints JSON: the losses of the micro batches, how far each parameter moves serially, and how far from there it ends
under the pipeline, on the rank where it is farthest.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import numpy as np
import paddle
from paddle.distributed import ReduceOp
from pipeline_engine import BATCH, CONFIGS, STEPS, build_model, prepared, steps_for
from pipeline_play import KINDS, SINKS, play

from paddle_rbt_plugin.graph.pir import dtype_name
from paddle_rbt_plugin.models import input_spec

RATE = 1.0
"""Of plain gradient descent, under which a parameter moves by its gradient."""
BEGINNING = {"moment": 0.0, "velocity": 0.0, "beta1_pow": 0.9, "beta2_pow": 0.999}
"""What states begin with, by a part of their names."""


class OneProgram:
    """The program that holds what all ranks do, op by op."""

    def __init__(self, inputs: set[str], loss: str):
        self.inputs, self.loss = inputs, loss
        self.program = paddle.static.Program()
        self.kept: dict[Any, Any] = {}
        """Values by rank and name, and by micro batch where they are of one."""
        self.leaves: dict[str, tuple[int, str, int | None]] = {}
        """Of the parameters, inputs and states of this program, the rank, the name and the micro batch, by their name here."""
        self.states: dict[tuple[int, str], Any] = {}
        """What updates leave of parameters and states, by rank and name."""
        self.mappings: dict[tuple[int, str, int], Any] = {}
        self.losses: dict[tuple[int, int], Any] = {}

    def act(self, rank: int, job: Any, op: Any, message: Any) -> Any:
        """Copies what a rank does; see ``play``."""
        mapping = self._mapping(rank, job, op)
        kind, name = KINDS.get(op.name()), op.name()
        if kind == "send":
            return mapping.look_up(op.operand_source(0))
        if kind == "receive":
            mapping.add(op.result(0), paddle.assign(message))  # either end may change what it has in place
        elif name == "pd_op.data":
            leaf = op.attrs()["name"]
            self._add_leaf(rank, op, leaf, job.micro_batch_id() if leaf in self.inputs else None, mapping)
            self.kept[rank, job.micro_batch_id(), leaf] = mapping.look_up(op.result(0))
        elif name == "builtin.parameter":
            self._add_leaf(rank, op, op.attrs()["parameter_name"], None, mapping)
        elif name in SINKS:
            output, value = op.attrs()["output_name"], mapping.look_up(op.operand_source(0))
            self.kept[rank, job.micro_batch_id(), output] = value
            if output == self.loss:
                self.losses[rank, job.micro_batch_id()] = value
        else:
            copy = op.clone(mapping, paddle.pir.CloneOptions(False, True, True))
            if copy.has_attr("events_to_wait"):  # that a receive has come, which is no op here
                copy.set_str_array_attr("events_to_wait", [])
            for result, operand in paddle.core.pir.get_op_inplace_info(op).items():
                value = op.operand_source(operand)
                if value.initialized() and value.has_name:
                    self.states[rank, value.name] = copy.result(result)
        return None

    def collect(self, tasks: list[Any]) -> None:
        """Computes what the ranks of a collective get; see ``play``."""
        mappings = [self._mapping(*task) for task in tasks]
        ops = [op for _, _, op in tasks]
        values = [m.look_up(op.operand_source(0)) for m, op in zip(mappings, ops, strict=True)]
        results = collective(ops[0], values)
        for mapping, op, result in zip(mappings, ops, results, strict=True):
            mapping.add(op.result(0), result)

    def _mapping(self, rank: int, job: Any, op: Any) -> Any:
        key = (rank, job.type(), job.micro_batch_id())
        if key not in self.mappings:
            self.mappings[key] = paddle.pir.IrMapping()
            for name, value in op.get_parent_block().kwargs().items():
                found = self._named(rank, job, name, value)
                if found is not None:
                    self.mappings[key].add(value, found)
        mapping = self.mappings[key]
        for value in op.operands_source():  # of a message that has come since the job began
            if value.initialized() and value.get_defining_op() is None and not mapping.has(value):
                mapping.add(value, self._named(rank, job, value.name, value))
        return mapping

    def _add_leaf(self, rank: int, op: Any, name: str, micro_batch: int | None, mapping: Any) -> None:
        key = (rank, name) if micro_batch is None else (rank, micro_batch, name)
        if key not in self.kept:
            value, here = op.result(0), "@".join([name, *map(str, key[:-1])])
            self.leaves[here] = (rank, name, micro_batch)
            if op.name() == "pd_op.data":
                self.kept[key] = paddle.static.data(here, value.shape, value.dtype)
            else:
                new = op.clone(paddle.pir.IrMapping(), paddle.pir.CloneOptions(False, True, True))
                new.set_str_attr("parameter_name", here)
                self.kept[key] = new.result(0)
        mapping.add(op.result(0), self.kept[key])

    def _named(self, rank: int, job: Any, name: str, value: Any) -> Any:
        for key in ((rank, job.micro_batch_id(), name), (rank, name)):
            if key in self.kept:
                return self.kept[key]
        if name.endswith("@GRAD@MERGE"):
            self.kept[rank, name] = paddle.zeros(value.shape, value.dtype)
        return self.kept.get((rank, name))


def collective(op: Any, values: list[Any]) -> list[Any]:
    """What each of the ranks gets of a collective, a tensor of its own."""
    kind, n = op.name().removeprefix("pd_op.").removesuffix("_"), len(values)
    if kind in ("all_reduce", "reduce_scatter"):
        how = op.attrs().get("reduce_type", ReduceOp.SUM)
        stacked = paddle.stack(values)
        if how in (ReduceOp.SUM, ReduceOp.AVG):
            total = stacked.sum(0) if how == ReduceOp.SUM else stacked.mean(0)
        else:
            total = {ReduceOp.MAX: paddle.max, ReduceOp.MIN: paddle.min, ReduceOp.PROD: paddle.prod}[how](stacked, 0)
        return paddle.split(total, n) if kind == "reduce_scatter" else [paddle.assign(total) for _ in range(n)]
    if kind == "all_gather":
        return [paddle.concat(values, 0) for _ in range(n)]
    assert kind == "all_to_all", f"{kind} is not played"
    parts = [paddle.split(value, n) for value in values]
    return [paddle.concat([part[i] for part in parts], 0) for i in range(n)]


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
    paddle.enable_static()
    one = OneProgram(set(inputs), engines[0]._loss_names[0])
    with paddle.static.program_guard(one.program, paddle.static.Program()):
        sent = play({rank: engine._job_plan for rank, engine in engines.items()}, one.act, one.collect)
    lying = {
        (rank, op.result(0).name): op.result(0)
        for rank, engine in engines.items()
        for op in engine._pir_dist_main_progs["train"].global_block().ops
        if op.name() in ("pd_op.data", "builtin.parameter")
    }
    scope, place = paddle.static.Scope(), paddle.CPUPlace()
    feed = {}
    for here, (rank, name, micro_batch) in one.leaves.items():
        value = lying[rank, name]
        if micro_batch is not None:
            feed[here] = part_of(batches[micro_batch][inputs.index(name)], value, rank)
        elif name in values:
            scope.var(here).get_tensor().set(np.ascontiguousarray(part_of(values[name], value, rank)), place)
        elif name.startswith("learning_rate"):
            feed[here] = np.float32(rate)
        else:
            begin = next(number for part, number in BEGINNING.items() if part in name)
            feed[here] = np.full(value._local_shape, begin, "float32")
    fetched = {**{("loss", *key): loss for key, loss in one.losses.items()}, **one.states}
    with paddle.static.scope_guard(scope):
        found = paddle.static.Executor(place).run(one.program, feed=feed, fetch_list=list(fetched.values()))
    results = dict(zip(fetched, found, strict=True))
    losses = {key[1:]: float(value) for key, value in results.items() if key[0] == "loss"}
    states = {key: value for key, value in results.items() if key[0] != "loss"}
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
    specs = input_spec(CONFIGS[model], BATCH // STEPS)
    batches = [[inputs_like(spec, rng) for spec in specs] for _ in range(steps)]
    optimizer, rate = optimizer_of(kind, clip)
    expected, before, after = serial(model, batches, optimizer, rate)
    losses, states, lying, sent = pipelined(model, (space, ranks, schedule), batches, before, optimizer, rate)
    last = [rank for rank, micro_batch in losses if micro_batch == 0]
    differ = dict.fromkeys(after, 0.0)
    parameters = {key: value for key, value in states.items() if key[1] in after}
    for (rank, name), value in parameters.items():
        # In a moved part only: a value that has not moved is as it was.
        differ[name] = max(differ[name], float(abs(part_of(after[name], lying[rank, name], rank) - value).max()))
    assert {name for _, name in parameters} == set(after), "not every parameter was updated"
    return {
        "losses": [losses[last[0], step] for step in range(steps)],
        "loss_on_ranks": max(abs(losses[rank, step] - expected[step]) for rank in last for step in range(steps)),
        "serial_losses": expected,
        "moved": {name: float(abs(after[name] - before[name]).max()) for name in after},
        "differ": differ,
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
