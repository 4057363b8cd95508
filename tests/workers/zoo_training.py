"""Trains every model of the zoo alone and under its mp plan in dygraph, and writes the losses of both.

python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo zoo_training.py OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import paddle
import paddle.distributed as dist
from zoo import ZOO, Model

import paddle_rbt_plugin as rbt

STEPS = 3


def build(model: Model) -> paddle.nn.Layer:
    paddle.seed(7)
    return model.build()


def train(layer: paddle.nn.Layer, batches: list) -> list[float]:
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=layer.parameters())
    losses = []
    for batch in batches:
        loss = layer(*batch)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        whole = dist.unshard_dtensor(loss) if loss.is_dist() else loss
        losses.append(float(whole.numpy()))
    return losses


def compare(model: Model, mp: int) -> dict[str, list[float]]:
    data = [[paddle.to_tensor(x) for x in model.sample(step)] for step in range(STEPS)]
    serial = train(build(model), data)
    layer = build(model)
    plan = rbt.tune(layer, input_spec=model.spec, cluster=f"1x{mp}:A100-80G", search_space={"mp": [mp], "pp": [1]})
    plan.shard_layer(layer)
    return {"serial": serial, "parallel": train(layer, list(plan.shard_dataloader(data)))}


def main(out: str) -> None:
    paddle.set_device("cpu")
    dist.init_parallel_env()
    losses = {name: compare(model, dist.get_world_size()) for name, model in ZOO.items()}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[-1])
