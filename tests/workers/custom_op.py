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
from steps import train_as

SHAPE = [8, 4, 16]


class Gated(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(16, 32, bias_attr=False) for _ in range(2))
        self.down = nn.Linear(32, 16, bias_attr=False)

    def forward(self, x: Any) -> Any:
        (gate,) = paddle._C_ops._run_custom_op("acme_silu", self.gate(x), 1.0)
        return self.down(gate * self.up(x))


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
    batches = [[random.standard_normal(SHAPE).astype("float32") for _ in range(2)] for _ in range(3)]
    _, losses = train_as(entry, network, distance, specs(), space, batches)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
