"""Every rank of a pipeline in one process: annotates a model as planned, completes, partitions, reshards, makes the jobs, and
plays them against each other.

Prints JSON, one entry per rank: what it sends and receives (peer, shape, phase), local shapes of its parameters, its jobs per
schedule. Paddle takes the number of ranks from PADDLE_TRAINERS_NUM. Nothing is executed.

A last argument leaves out a part of the hand-over of interleaved pipelines: ``exchange`` sends as Paddle does,
``communicators`` lets forward and backward share theirs.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import paddle
from paddle.distributed.auto_parallel.static import engine
from paddle.distributed.auto_parallel.static.pir_pass import pipeline_pass
from paddle.distributed.auto_parallel.static.reshard_funcs.same_status_reshard_func import SameStatusReshardFunction
from paddle.distributed.auto_parallel.strategy import PipelineConfig
from pipeline_engine import build_model, config_of
from pipeline_play import KINDS, begin, check_message, peer, play

from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.handover.pir import chunks
from paddle_rbt_plugin.handover.pir.partitioning import as_rank, partition, resolve
from paddle_rbt_plugin.handover.pir.pipeline import annotate_stages, schedulable
from paddle_rbt_plugin.handover.pir.trace import trace_layer
from paddle_rbt_plugin.layers import cluster_layers
from paddle_rbt_plugin.models import input_spec
from paddle_rbt_plugin.request import Request
from paddle_rbt_plugin.tuner import tune_graph

BATCH = 8


def main(model: str, space: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    model = f"{model}/{max(4, space['pp'] * space.get('vpp', 1))}"
    with paddle.LazyGuard():
        layer = build_model(model)
    trace = trace_layer(layer, input_spec(config_of(model), BATCH))
    batch = BATCH * space["accumulate_steps"]
    plan = tune_graph(trace.graph, Request(Settings(cluster=f"1x{ranks}:A100-80G", search_space=space), global_batch=batch))
    reports, jobs = [], {}
    for rank in range(ranks):
        with as_rank(rank), schedulable(plan):
            made = Rank(trace, plan, rank)
            reports.append({"rank": rank, **made.report(layer, plan, rank)})
            jobs[rank] = made.jobs
    for schedule in jobs[0]:
        play({rank: by_schedule[schedule] for rank, by_schedule in jobs.items()}, check_message)
    return reports


class Rank:
    """The program of the rank that Paddle takes this process for."""

    def __init__(self, trace: Any, plan: Any, rank: int):
        begin(rank)
        self.trace = trace
        self.program = trace.program.clone()
        leaves = {name: t.placement for name, t in plan.leaves(trace.graph).items()}
        annotate_stages(self.program, trace.graph, plan, leaves)
        loss = [op for op in self.program.global_block().ops if op.num_results()][-1].result(0)
        self.loss_ranks = list(loss.process_mesh.process_ids)
        resolve(partition(self.program))
        if plan.vpp > 1:
            engine.check_chunk_id(self.program)
        self.dense = self.program.clone()
        paddle.base.libpaddle.pir.apply_dist2dense_pass(self.dense)
        self.jobs = {}
        for schedule in ["VPP"] if plan.vpp > 1 else ["FThenB", "1F1B"]:
            settings = {"schedule_mode": schedule, "pp_degree": plan.degrees["pp"], "vpp_degree": plan.vpp}
            settings |= {"enable": True, "accumulate_steps": plan.accumulate_steps}
            copy = self.dense.clone()
            self.jobs[schedule] = pipeline_pass([copy], [copy], PipelineConfig(settings))

    def _copied(self, plan: Any, rank: int) -> set[str]:
        """The parameters that this stage reads and another one has as well."""
        graph, layers = self.trace.graph, cluster_layers(self.trace.graph)
        entry_of, layer_of = plan.stage_of_layers(layers.count), layers.layer_of()
        here = {op.index for op in graph if rank in plan.stages[entry_of[layer_of[op.index]]].devices}
        return {t.name for t in graph.params if any(op.index in here for op in graph.consumers(t.index))}

    def report(self, layer: Any, plan: Any, rank: int) -> dict[str, Any]:
        shapes = {p.name: tuple(p.shape) for p in layer.parameters()}
        parameters = {
            op.attrs()["parameter_name"]: list(op.result(0)._local_shape)
            for op in self.program.global_block().ops
            if op.name() == "builtin.parameter"
        }
        planned = {
            name: list(t.placement.local_shape(shapes[name], plan.stages[t.stage].process_mesh))
            for name, t in plan.tensors.items()
            if t.kind == "param" and (rank in plan.stages[t.stage].devices or name in self._copied(plan, rank))
        }
        messages = []
        for op in self.dense.global_block().ops:
            if kind := KINDS.get(op.name()):
                value = op.operand_source(0) if kind == "send" else op.result(0)
                messages.append([kind, peer(rank, op), list(value.shape), op.op_role])
        return {
            "loss_ranks": self.loss_ranks,
            "parameters": parameters,
            "planned": planned,
            "messages": messages,
            "jobs": {s: [[job.type(), job.micro_batch_id()] for job in plan.job_list()] for s, plan in self.jobs.items()},
            "stages": [list(s.devices) for s in plan.stages[: plan.degrees["pp"]]],
        }


def leave_out(part: str) -> None:
    if part == "exchange":
        chunks.exchange = SameStatusReshardFunction.reshard
    else:
        own = chunks._communicator
        chunks._communicator = lambda ranks, backward: own(ranks, False)


if __name__ == "__main__":
    for part in sys.argv[4:]:
        leave_out(part)
    print("REPORT" + json.dumps(main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))))
