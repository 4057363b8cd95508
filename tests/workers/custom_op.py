"""Trains a gated network whose activation is a custom op, and writes its losses.

    python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo custom_op.py ENTRY AXIS LIBRARY OUT

``ENTRY`` is serial, to_static or dygraph, ``AXIS`` dp or mp; ``LIBRARY`` holds the custom op.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.static import InputSpec
from paddle.utils.cpp_extension import load_op_meta_info_and_register_op
from steps import over_ranks, train

import paddle_rbt_plugin as rbt

SHAPE = [8, 4, 16]


class Gated(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(16, 32, bias_attr=False) for _ in range(2))
        self.down = nn.Linear(32, 16, bias_attr=False)

    def forward(self, x: Any) -> Any:
        (gate,) = paddle._C_ops._run_custom_op("acme_silu", self.gate(x), 1.0)
        return self.down(gate * self.up(x))


class WithLoss(nn.Layer):
    def __init__(self, network: nn.Layer):
        super().__init__()
        self.network = network

    def forward(self, x: Any, y: Any) -> Any:
        return distance(self.network(x), y)


def distance(x: Any, y: Any) -> Any:
    return paddle.mean((x - y) ** 2)


def specs() -> list[InputSpec]:
    return [InputSpec(SHAPE, "float32", name) for name in ("x", "y")]


def main(entry: str, axis: str, library: str, out: str) -> None:
    paddle.set_device("cpu")
    if "PADDLE_TRAINER_ID" in os.environ:
        dist.init_parallel_env()
    load_op_meta_info_and_register_op(library)
    paddle.seed(2024)
    network, space = Gated(), {axis: 2}
    random = np.random.default_rng(0)
    batches: Any = [[random.standard_normal(SHAPE).astype("float32") for _ in range(2)] for _ in range(3)]
    if entry == "to_static":
        optimizer = paddle.optimizer.AdamW(1e-2, parameters=network.parameters())
        strategy = dist.Strategy({"tuning": {"enable": True, "pass_name": "rule_based_tuner", "search_space": space}})
        model = dist.to_static(network, None, distance, optimizer, strategy, input_spec=[specs()[:1], specs()[1:]])
        model.train()
        losses = [over_ranks(model(*b)) for b in rbt.engine_plan(model).shard_dataloader(batches)]
    else:
        model = WithLoss(network)
        batches = [[paddle.to_tensor(v) for v in b] for b in batches]
        if entry == "dygraph":
            plan = rbt.tune(model, input_spec=specs(), search_space=space)
            plan.shard_layer(model)
            batches = plan.shard_dataloader(batches)
        losses = train(model, batches)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
