"""Starts training along ``mp`` as planned, and then with what settles partial values taken out, with the guard and without it.

Every rank writes, for each of these, the losses or the error.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.static import InputSpec
from partial_values import BATCH, LENGTH, SHAPES, Network, batches, token_loss

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.handover.pir import patches


def losses(verify: bool) -> Any:
    paddle.disable_static()
    paddle.seed(1)
    with paddle.utils.unique_name.guard(), paddle.static.scope_guard(paddle.static.Scope()):
        network = Network(SHAPES["embedding, concat"])
        optimizer = paddle.optimizer.SGD(0.1, parameters=network.parameters())
        space = {"mp": 2, "pp": 1, "sharding_stage": 0, "recompute": "none"}
        tuning = {"enable": True, "pass_name": "rule_based_tuner", "search_space": space, "verify": verify}
        spec = [[InputSpec([BATCH, LENGTH], "int64", "ids")], [InputSpec([BATCH, LENGTH], "int64", "labels")]]
        try:
            model = dist.to_static(network, None, token_loss, optimizer, dist.Strategy({"tuning": tuning}), input_spec=spec)
            model.train()
        except rbt.HandoverError as error:
            return str(error)
        return [float(model(*batch)) for batch in rbt.engine_plan(model).shard_dataloader(batches())]


def main(out: str) -> None:
    paddle.set_device("cpu")
    dist.init_parallel_env()
    found = {"as planned": losses(True)}
    with patches.gradients_whole.left_out():
        found["otherwise"], found["otherwise, unguarded"] = losses(True), losses(False)
    with open(f"{out}.{dist.get_rank()}", "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
