"""Every rank of a pipeline in one process: annotates a model as planned, completes, partitions, reshards, makes the jobs.

Prints JSON, one entry per rank: what it sends and receives (peer, shape, phase), local shapes of its parameters, its jobs per
schedule. Paddle takes the number of ranks from PADDLE_TRAINERS_NUM. Nothing is executed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import paddle
from paddle.distributed.auto_parallel.static.pir_pass import pipeline_pass
from paddle.distributed.auto_parallel.static.process_group import get_process_group
from paddle.distributed.auto_parallel.strategy import PipelineConfig

from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.handover.pipeline import annotate_stages
from paddle_rbt_plugin.handover.structure import as_rank, partition, resolve
from paddle_rbt_plugin.handover.trace import trace_layer
from paddle_rbt_plugin.models import GPTConfig, LlamaConfig, build, input_spec
from paddle_rbt_plugin.tuner import tune_graph

MODELS = {
    "gpt": GPTConfig(layers=4, hidden=64, ffn=256, heads=8, vocab=128, seq=16),
    "llama": LlamaConfig(layers=4, hidden=64, ffn=256, heads=8, kv_heads=8, vocab=128, seq=16),
}


def main(model: str, space: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    config = MODELS[model]
    with paddle.LazyGuard():
        layer = build(config)
    trace = trace_layer(layer, input_spec(config, 8))
    plan = tune_graph(trace.graph, Settings(cluster=f"1x{ranks}:A100-80G", search_space=space), global_batch=32)
    reports = []
    for rank in range(ranks):
        with as_rank(rank):
            reports.append(report(trace, layer, plan, rank))
    return reports


def report(trace: Any, layer: Any, plan: Any, rank: int) -> dict[str, Any]:
    program = trace.program.clone()
    annotate_stages(program, trace.graph, plan, {name: t.placement for name, t in plan.leaves(trace.graph).items()})
    shapes = {p.name: tuple(p.shape) for p in layer.parameters()}
    loss = [op for op in program.global_block().ops if op.num_results()][-1].result(0)
    loss_ranks = list(loss.process_mesh.process_ids)
    resolve(partition(program))
    parameters = {
        op.attrs()["parameter_name"]: list(op.result(0)._local_shape)
        for op in program.global_block().ops
        if op.name() == "builtin.parameter"
    }
    dense = program.clone()
    paddle.base.libpaddle.pir.apply_dist2dense_pass(dense)
    messages: list[list[Any]] = []
    for op in dense.global_block().ops:
        kind = op.name().removeprefix("pd_op.").removesuffix("_")
        if kind in ("send_v2", "p_send"):
            messages.append(["send", peer(op), list(op.operand_source(0).shape), op.op_role])
        elif kind in ("recv_v2", "p_recv"):
            messages.append(["recv", peer(op), list(op.result(0).shape), op.op_role])
    jobs = {}
    for schedule in ("FThenB", "1F1B"):
        settings = PipelineConfig(
            {"enable": True, "schedule_mode": schedule, "pp_degree": plan.degrees["pp"], "vpp_degree": 1, "accumulate_steps": 4}
        )
        copy = dense.clone()
        made = pipeline_pass([copy], [copy], settings)
        jobs[schedule] = [job.type() for job in made.job_list()]
    planned = {
        name: list(t.placement.local_shape(shapes[name], plan.stages[t.stage].process_mesh))
        for name, t in plan.tensors.items()
        if t.kind == "param" and rank in plan.stages[t.stage].devices
    }
    return {
        "rank": rank, "loss_ranks": loss_ranks, "parameters": parameters, "planned": planned, "messages": messages,
        "jobs": jobs, "stages": [list(s.devices) for s in plan.stages],
    }  # fmt: skip


def peer(op: Any) -> int:
    """The rank at the other end: an op names its place in the group."""
    return get_process_group(op.attrs()["ring_id"]).ranks[op.attrs()["peer"]]


if __name__ == "__main__":
    print("REPORT" + json.dumps(main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))))
