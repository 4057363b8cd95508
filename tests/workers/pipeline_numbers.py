"""Trains one step under a pipeline, all ranks in this process, and the same step serially.

Static sends and receives do not run on CPUs. So the jobs of all ranks are played against each other, every op that runs is
copied into one program, where a send and its receive are one value, and that program is executed. Prints JSON: the losses of
the micro batches, how far each parameter moves serially, and how far from there it ends under the pipeline.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import paddle
from pipeline_engine import BATCH, CONFIGS, STEPS, prepared
from pipeline_play import KINDS, play

from paddle_rbt_plugin.graph.pir import dtype_name
from paddle_rbt_plugin.models import build, input_spec

RATE = 1.0
"""Of plain gradient descent, under which a parameter moves by its gradient."""


class OneProgram:
    """The program that holds what all ranks do, op by op."""

    def __init__(self, inputs: set[str], loss: str):
        self.inputs, self.loss = inputs, loss
        self.program = paddle.static.Program()
        self.kept: dict[Any, Any] = {}
        """Values by rank and name, and by micro batch where they are of one; parameters and data by name for all ranks."""
        self.mappings: dict[tuple[int, str, int], Any] = {}
        self.losses: dict[int, Any] = {}

    def act(self, rank: int, job: Any, op: Any, message: Any) -> Any:
        """Copies what a rank does; see ``play``."""
        key = (rank, job.type(), job.micro_batch_id())
        if key not in self.mappings:
            self.mappings[key] = paddle.pir.IrMapping()
            for name, value in op.get_parent_block().kwargs().items():
                self.mappings[key].add(value, self._named(rank, job, name, value))
        mapping = self.mappings[key]
        kind = KINDS.get(op.name())
        if kind == "send":
            return mapping.look_up(op.operand_source(0))
        if kind == "receive":
            mapping.add(op.result(0), message)
        elif op.name() == "pd_op.data":
            name = op.attrs()["name"]
            self._add_leaf(rank, job, op, f"{name}@{job.micro_batch_id()}" if name in self.inputs else name, name, mapping)
        elif op.name() == "builtin.parameter":
            name = op.attrs()["parameter_name"]
            self._add_leaf(rank, job, op, name, name, mapping)
        elif op.name() in ("builtin.shadow_output", "pd_op.set_persistable_value"):
            name, value = op.attrs()["output_name"], mapping.look_up(op.operand_source(0))
            self.kept[rank, job.micro_batch_id(), name] = value
            if name == self.loss:
                self.losses[job.micro_batch_id()] = value
        else:
            copy = op.clone(mapping, paddle.pir.CloneOptions(False, True, True))
            if copy.has_attr("events_to_wait"):  # that a receive has come, which is no op here
                copy.set_str_array_attr("events_to_wait", [])
        return None

    def _add_leaf(self, rank: int, job: Any, op: Any, key: str, name: str, mapping: Any) -> None:
        if key not in self.kept:
            value = op.result(0)
            if key != name:
                self.kept[key] = paddle.static.data(key, value.shape, value.dtype)
            else:
                new = op.clone(paddle.pir.IrMapping(), paddle.pir.CloneOptions(False, True, True))
                self.kept[key] = new.result(0)
        mapping.add(op.result(0), self.kept[key])
        self.kept[rank, job.micro_batch_id(), name] = self.kept[key]

    def _named(self, rank: int, job: Any, name: str, value: Any) -> Any:
        for key in ((rank, job.micro_batch_id(), name), (rank, name)):
            if key in self.kept:
                return self.kept[key]
        assert name.endswith("@GRAD@MERGE"), f"rank {rank} reads {name!r} in {job.type()}, which nothing has made"
        self.kept[rank, name] = paddle.zeros(value.shape, value.dtype)
        return self.kept[rank, name]


def pipelined(model: str, settings: tuple[Any, ...], batches: list[list[Any]], values: dict[str, Any]) -> Any:
    """The losses, and the parameters by name, after a step of all ranks that begins with ``values``."""
    engines = {rank: prepared(rank, model, *settings, optimizer=paddle.optimizer.SGD) for rank in range(settings[1])}
    inputs = engines[0].get_feed_name_list()
    paddle.enable_static()
    one = OneProgram(set(inputs), engines[0]._loss_names[0])
    with paddle.static.program_guard(one.program, paddle.static.Program()):
        play({rank: engine._job_plan for rank, engine in engines.items()}, one.act)
    scope, place = paddle.static.global_scope(), paddle.CPUPlace()
    for name, value in values.items():
        scope.var(name).get_tensor().set(value, place)
    feed = {f"{name}@{step}": array for step, arrays in enumerate(batches) for name, array in zip(inputs, arrays, strict=True)}
    feed |= {name: np.float32(RATE) for name in one.kept if str(name).startswith("learning_rate")}
    losses = [one.losses[step] for step in range(len(batches))]
    found = paddle.static.Executor(place).run(one.program, feed=feed, fetch_list=losses)
    return [float(loss) for loss in found], {name: np.array(scope.find_var(name).get_tensor()) for name in values}


def serial(model: str, batches: list[list[Any]]) -> Any:
    """The losses, and the parameters by name before and after the same step."""
    with paddle.utils.unique_name.guard():
        paddle.seed(0)
        layer = build(CONFIGS[model])
    before = {p.name: p.numpy() for p in layer.parameters()}
    losses = [layer(*map(paddle.to_tensor, arrays)) for arrays in batches]
    paddle.add_n(losses).scale(1 / len(losses)).backward()
    paddle.optimizer.SGD(RATE, parameters=layer.parameters()).step()
    return [float(loss) for loss in losses], before, {p.name: p.numpy() for p in layer.parameters()}


def main(model: str, space: dict[str, Any], ranks: int, schedule: str) -> None:
    rng = np.random.default_rng(0)
    specs = input_spec(CONFIGS[model], BATCH // STEPS)
    batches = [[rng.integers(0, 16, spec.shape).astype(dtype_name(spec.dtype)) for spec in specs] for _ in range(STEPS)]
    expected, before, after = serial(model, batches)
    losses, parameters = pipelined(model, (space, ranks, schedule), batches, before)
    report = {
        "losses": losses,
        "serial_losses": expected,
        "moved": {name: float(abs(after[name] - before[name]).max()) for name in after},
        "differ": {name: float(abs(after[name] - parameters[name]).max()) for name in after},
    }
    print("REPORT" + json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
