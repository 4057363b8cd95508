"""Trains a model of the zoo alone and as a static program handed over under a plan, and writes the losses of both.

python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo zoo_static.py MODEL [SPACE] OUT

SPACE is the search space as JSON, by default {"mp": [2]}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import paddle
import paddle.distributed as dist
from zoo import ZOO
from zoo_training import STEPS, build, train

import paddle_rbt_plugin as rbt


class Hidden(paddle.nn.Layer):
    """The model under a loss function that does nothing: ``dist.to_static`` wants one, and labels for it."""

    def __init__(self, model: paddle.nn.Layer):
        super().__init__()
        self.model = model

    def forward(self, tokens, labels):
        return self.model(tokens, labels)


def passed_on(loss, labels):
    return loss


def train_static(name: str, data: list, space: dict) -> tuple[list[float], list[str]]:
    layer = Hidden(build(ZOO[name]))
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=layer.parameters())
    tuning = {"enable": True, "pass_name": "rule_based_tuner", "search_space": space}
    spec = ZOO[name].spec
    extra = paddle.static.InputSpec(spec[1].shape, spec[1].dtype, "unused")
    model = dist.to_static(layer, None, passed_on, optimizer, dist.Strategy({"tuning": tuning}), input_spec=[spec, [extra]])
    model.train()
    loader = rbt.engine_plan(model).shard_dataloader([[*batch, batch[1]] for batch in data])
    losses = paddle.to_tensor([float(model(*batch)) for batch in loader])
    dist.all_reduce(losses, dist.ReduceOp.SUM)  # each rank has that of its part of the batch
    ops = model._engine._fwd_main_progs["train"].global_block().ops
    return (losses / dist.get_world_size()).tolist(), sorted({op.name().removeprefix("pd_op.") for op in ops})


def main(name: str, *more: str) -> None:
    *space, out = more
    paddle.set_device("cpu")
    dist.init_parallel_env()
    data = [[paddle.to_tensor(x) for x in ZOO[name].sample(step)] for step in range(STEPS)]
    serial = train(build(ZOO[name]), data)
    parallel, ops = train_static(name, data, json.loads(space[0]) if space else {"mp": [2]})
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({"serial": serial, "parallel": parallel, "ops": ops}))


if __name__ == "__main__":
    main(*sys.argv[1:])
