"""``auto.Engine`` with ``strategy.tuning`` and a pipeline, for every rank in one process, up to the jobs of the rank, which are
played against each other, those of training and those of evaluation.

Prints JSON, one entry per rank: the degrees of the plan that the engine holds, the parameters of its program, and its jobs. The
engine runs its own chain (build, the hook, backward, optimizer, partition, reshard, gradient merge, pipeline pass); the
communicators and the values of parameters, which need the other processes, are left out.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import Any

import paddle
from paddle.distributed import parallel
from paddle.distributed.fleet import auto
from pipeline_play import begin, check_message, play

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.handover import passes
from paddle_rbt_plugin.handover.engine import guard
from paddle_rbt_plugin.models import GPTConfig, LlamaConfig, build, input_spec

BATCH, STEPS = 8, 4
"""Of a step and its micro batches, unless a schedule needs more of these: a pipeline is filled by as many as it has stages."""
CONFIGS = {
    "gpt": GPTConfig(layers=8, hidden=64, ffn=256, heads=8, vocab=128, seq=16),
    "llama": LlamaConfig(layers=4, hidden=64, ffn=256, heads=8, kv_heads=8, vocab=128, seq=16),
    "biased": GPTConfig(layers=8, hidden=64, ffn=256, heads=8, vocab=128, seq=16),
}


class Biased(paddle.nn.Layer):
    """A GPT whose layers all add the same bias to their scores: a trained one of positions, and one that hides some of the
    tokens. Both are made before the first layer, of a parameter and of the batch."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gpt = build(config)
        self.bias = self.create_parameter([1, config.heads, config.seq, config.seq])

    def forward(self, tokens: Any, position_ids: Any, attention_mask: Any, labels: Any, loss_mask: Any) -> Any:
        hidden = paddle.unsqueeze(paddle.cast(tokens < 3, "float32"), [1, 2]) * -10.0
        return self.gpt(tokens, position_ids, attention_mask + self.bias * 2.0 + hidden, labels, loss_mask)


def config_of(model: str) -> Any:
    """The config of a model, which ``gpt/4`` has with 4 layers."""
    name, _, layers = model.partition("/")
    return replace(CONFIGS[name], layers=int(layers)) if layers else CONFIGS[name]


def build_model(model: str) -> Any:
    return (Biased if model.startswith("biased") else build)(config_of(model))


def steps_for(ranks_in_line: int) -> int:
    """The micro batches of a step in a pipeline of so many stages."""
    return max(STEPS, ranks_in_line)


class Loss(paddle.nn.Layer):
    """The model's forward returns the loss."""

    def forward(self, loss: Any) -> Any:
        return loss


def engine_of(
    model: str, space: dict[str, Any], ranks: int, schedule: str, precision: str, optimizer: Any, steps: int | None
) -> Any:
    strategy = auto.Strategy()
    strategy.auto_mode = "semi"
    strategy.pipeline.enable = True
    strategy.pipeline.schedule_mode = schedule
    strategy.pipeline.accumulate_steps = steps or steps_for(space["pp"])
    strategy.tuning.enable = True
    strategy.tuning.pass_name = "rule_based_tuner"
    strategy.tuning.cluster = f"1x{ranks}:A100-80G"
    strategy.tuning.search_space = space
    if precision != "float32":
        strategy.amp.enable, strategy.amp.dtype, strategy.amp.level = True, precision, "O2"
    layer = build_model(model)
    return auto.Engine(layer, Loss(), optimizer(1e-3, parameters=layer.parameters()), strategy=strategy)


def prepared(
    rank: int,
    model: str,
    space: dict[str, Any],
    ranks: int,
    schedule: str,
    precision: str = "float32",
    optimizer: Any = None,
    steps: int | None = None,
) -> Any:
    """The engine of a rank, its jobs made; AdamW is the default of ``optimizer``."""
    as_rank(rank)
    # It refuses meshes on which CPUs compute wrong; nothing computes here.
    passes.enable_static_training_on_cpu = lambda meshes: None
    guard._on_cpus = lambda collectives, mesh: collectives
    with paddle.utils.unique_name.guard():
        paddle.seed(0)
        engine = engine_of(model, space, ranks, schedule, precision, optimizer or paddle.optimizer.AdamW, steps)
        make_jobs(rank, engine, model, "train")
    return engine


def as_rank(rank: int) -> None:
    """Lets Paddle take this process for that rank, in dygraph: the engine of the rank before has left it static."""
    paddle.disable_static()
    os.environ["PADDLE_TRAINER_ID"] = str(rank)
    parallel._global_parallel_env = None


def make_jobs(rank: int, engine: Any, model: str, mode: str) -> Any:
    """Paddle's job plan of the engine of a rank in a mode."""
    begin(rank)
    engine.to_mode(mode)
    steps = engine._strategy.pipeline.accumulate_steps
    engine._inputs_spec, engine._labels_spec = engine._validate_spec(input_spec(config_of(model), steps * BATCH // STEPS)), []
    engine._build(mode)
    engine._parallel_pir(mode)
    return engine._job_plan


def report(rank: int, engine: Any) -> dict[str, Any]:
    pipeline = engine._strategy.pipeline
    return {
        "rank": rank,
        "degrees": rbt.engine_plan(engine).degrees,
        "stages": [list(s.devices) for s in rbt.engine_plan(engine).stages],
        "pipeline": [pipeline.schedule_mode, pipeline.pp_degree, pipeline.vpp_degree, pipeline.accumulate_steps],
        "parameters": sorted(p.name for p in engine._pir_dense_main_progs["train"].global_block().all_parameters()),
        "jobs": [[job.type(), job.micro_batch_id()] for job in engine._job_plan.job_list()],
    }


def main(model: str, space: dict[str, Any], ranks: int, *schedule: str) -> None:
    engines = {rank: prepared(rank, model, space, ranks, *schedule) for rank in range(ranks)}
    play({rank: engine._job_plan for rank, engine in engines.items()}, check_message)
    print("REPORT" + json.dumps([report(rank, engine) for rank, engine in engines.items()]))
    evaluations = {}
    for rank, engine in engines.items():
        as_rank(rank)
        evaluations[rank] = make_jobs(rank, engine, model, "eval")
    play(evaluations, check_message)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
