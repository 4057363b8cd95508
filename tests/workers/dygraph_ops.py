"""Trains one step in dygraph, and writes how far its loss and its gradients are from serial ones.

    python -m paddle.distributed.launch --nproc_per_node N --backend gloo dygraph_ops.py OPS MP MODELS OUT

``OPS`` is ``plan`` for the ops that ``plan.shard_layer`` installs and ``paddle`` for Paddle's own; ``MP`` the tensor-parallel
degree, other ranks are replicas; ``MODELS`` names models of the zoo, with commas. Paddle's log of all it does goes to stderr,
with a line ``STEP model phase`` where a phase begins.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(GLOG_v="3", GLOG_minloglevel="0")  # the command line, where a test has run it, asks for less
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import paddle
import paddle.distributed as dist
from steps import over_ranks
from zoo import ZOO, Model

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.handover.dygraph import sharding as dygraph


def mark(model: str, phase: str) -> None:
    print("STEP", model, phase, file=sys.stderr, flush=True)


def build(model: Model) -> paddle.nn.Layer:
    paddle.seed(7)
    return model.build()


def whole(tensor: Any) -> np.ndarray:
    return (dist.unshard_dtensor(tensor) if tensor.is_dist() else tensor).numpy()


def step(name: str, mp: int) -> dict[str, float]:
    model, degrees = ZOO[name], {"mp": mp, "dp": dist.get_world_size() // mp, "pp": 1}
    batch = [paddle.to_tensor(x) for x in model.sample(0)]
    serial = build(model)
    expected = serial(*batch)
    expected.backward()
    layer = build(model)
    cluster = f"1x{dist.get_world_size()}:A100-80G"
    plan = rbt.tune(layer, input_spec=model.spec, cluster=cluster, search_space=degrees)
    plan.shard_layer(layer)
    (sharded,) = plan.shard_dataloader([batch])
    mark(name, "forward")
    loss = layer(*sharded)
    mark(name, "backward")
    loss.backward()
    mark(name, "end")
    pairs = zip(serial.parameters(), layer.parameters(), strict=True)
    gradients = max(float(np.abs(whole(b.grad) - a.grad.numpy()).max()) for a, b in pairs if a.grad is not None)
    return {"gradients": gradients, "loss": abs(over_ranks(loss) - float(expected))}


def main(ops: str, mp: str, models: str, out: str) -> None:
    paddle.set_device("cpu")
    dist.init_parallel_env()
    if ops == "paddle":
        dygraph.shard_ops = lambda mesh: None
    found = {name: step(name, int(mp)) for name in models.split(",")}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
