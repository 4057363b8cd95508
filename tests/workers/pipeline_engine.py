"""``auto.Engine`` with ``strategy.tuning`` and a pipeline, for every rank in one process, up to the jobs of the rank.

Prints JSON, one entry per rank: the degrees of the plan that the engine holds, the parameters of its program, and its jobs. The
engine runs its own chain (build, the hook, backward, optimizer, partition, reshard, gradient merge, pipeline pass); the
communicators and the values of parameters, which need the other processes, are left out.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import paddle
from paddle.distributed import parallel
from paddle.distributed.fleet import auto

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.handover import passes
from paddle_rbt_plugin.models import GPTConfig, build, input_spec

BATCH, STEPS = 8, 4
CONFIG = GPTConfig(layers=4, hidden=64, ffn=256, heads=8, vocab=128, seq=16)


class Loss(paddle.nn.Layer):
    """The model's forward returns the loss."""

    def forward(self, loss: Any) -> Any:
        return loss


def engine_of(space: dict[str, Any], ranks: int, schedule: str) -> Any:
    strategy = auto.Strategy()
    strategy.auto_mode = "semi"
    strategy.pipeline.enable = True
    strategy.pipeline.schedule_mode = schedule
    strategy.pipeline.accumulate_steps = STEPS
    strategy.tuning.enable = True
    strategy.tuning.pass_name = "rule_based_tuner"
    strategy.tuning.cluster = f"1x{ranks}:A100-80G"
    strategy.tuning.search_space = space
    model = build(CONFIG)
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    return auto.Engine(model, Loss(), optimizer, strategy=strategy)


def report(space: dict[str, Any], ranks: int, rank: int, schedule: str) -> dict[str, Any]:
    paddle.disable_static()  # as the engine of the rank before has left it
    os.environ["PADDLE_TRAINER_ID"] = str(rank)
    parallel._global_parallel_env = None
    passes.enable_static_training_on_cpu = lambda meshes: (
        None
    )  # it refuses meshes on which CPUs compute wrong; nothing computes
    engine = engine_of(space, ranks, schedule)
    engine.to_mode("train")
    engine._inputs_spec, engine._labels_spec = engine._validate_spec(input_spec(CONFIG, BATCH)), []
    engine._build("train")
    engine._parallel_pir("train")
    pipeline = engine._strategy.pipeline
    return {
        "rank": rank,
        "degrees": rbt.engine_plan(engine).degrees,
        "stages": [list(s.devices) for s in rbt.engine_plan(engine).stages],
        "pipeline": [pipeline.schedule_mode, pipeline.pp_degree, pipeline.accumulate_steps],
        "parameters": sorted(p.name for p in engine._pir_dense_main_progs["train"].global_block().all_parameters()),
        "jobs": [job.type() for job in engine._job_plan.job_list()],
    }


if __name__ == "__main__":
    space, ranks = json.loads(sys.argv[1]), int(sys.argv[2])
    print("REPORT" + json.dumps([report(space, ranks, rank, sys.argv[3]) for rank in range(ranks)]))
