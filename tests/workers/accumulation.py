"""Trains with micro batches in engines of one job, each against the serial training on whole batches; writes what differs.

    [python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo] accumulation.py CASES OUT

``CASES`` is JSON, by name: optimizer and its arguments, clip and its argument, ``ParamAttr`` of two parameters, degrees, micro
batches, ``avg``; without ``patched`` Paddle's own pass averages. Written is by name the largest difference of a weight over its
largest movement and how many times the optimizer scales.
"""

from __future__ import annotations

import contextlib
import json
import sys
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet import auto

from paddle_rbt_plugin.handover.pir import gradient_merge

BATCH, STEPS, WIDTH = 16, 3, 16


class Samples(paddle.io.Dataset):
    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return np.random.default_rng(i).standard_normal(WIDTH).astype("float32"), np.array([i % 4])


class Network(nn.Layer):
    def __init__(self, attribute: paddle.ParamAttr | None) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.up, self.down = nn.Linear(WIDTH, 64, weight_attr=attribute), nn.Linear(64, WIDTH, bias_attr=attribute)

    def forward(self, x):
        return self.head(x + self.down(nn.functional.gelu(self.up(self.norm(x)))))


def made(case: dict) -> tuple[nn.Layer, paddle.optimizer.Optimizer]:
    paddle.disable_static()
    paddle.seed(5)
    attribute = dict(case.get("attribute", {}))
    if "L1" in attribute:
        attribute["regularizer"] = paddle.regularizer.L1Decay(attribute.pop("L1"))
    net = Network(paddle.ParamAttr(**attribute) if attribute else None)
    clip = getattr(nn, case["clip"][0])(case["clip"][1]) if case.get("clip") else None
    optimizer = getattr(paddle.optimizer, case["optimizer"])
    return net, optimizer(parameters=net.parameters(), grad_clip=clip, **case["arguments"])


def serial(case: dict) -> tuple[dict, dict]:
    """The weights before and after; without ``avg`` the gradients of micro batches are summed."""
    net, optimizer = made(case)
    before = {p.name: p.numpy() for p in net.parameters()}
    data = Samples()
    for begin in range(0, len(data), BATCH):
        x, y = (paddle.to_tensor(np.stack(v)) for v in zip(*(data[i] for i in range(begin, begin + BATCH)), strict=True))
        loss = nn.CrossEntropyLoss()(net(x), y)
        loss.scale(1 if case.get("avg", True) else case["micro_batches"]).backward()
        optimizer.step()
        optimizer.clear_grad()
    return before, {p.name: p.numpy() for p in net.parameters()}


def part(whole: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """What this rank has of a weight of which it has that shape."""
    rank = dist.get_rank()
    return whole[
        tuple(slice(rank * n, (rank + 1) * n) if n < size else slice(size) for n, size in zip(shape, whole.shape, strict=True))
    ]


def compare(case: dict) -> dict:
    with paddle.utils.unique_name.guard():
        before, after = serial(case)
    with paddle.utils.unique_name.guard(), paddle.static.scope_guard(paddle.static.Scope()):
        net, optimizer = made(case)
        space = {"recompute": "none", "pp": 1, **case.get("space", {})}
        merge = {"enable": True, "k_steps": case["micro_batches"], "avg": case.get("avg", True)}
        tuning = {"enable": True, "pass_name": "rule_based_tuner", "search_space": space}
        strategy = auto.Strategy({"tuning": tuning, "gradient_merge": merge})
        engine = auto.Engine(net, nn.CrossEntropyLoss(), optimizer, strategy=strategy)
        own = mock.patch.object(gradient_merge.averaged_first, "apply", contextlib.nullcontext)
        with contextlib.nullcontext() if case.get("patched", True) else own:
            engine.fit(Samples(), batch_size=BATCH, verbose=0)
        scope = paddle.static.global_scope()
        found = {name: np.array(scope.find_var(name).get_tensor()) for name in after}
        before, after = ({name: part(whole[name], found[name].shape) for name in found} for whole in (before, after))
        scales = [op.name() for op in engine._job_plan.ir_program("optimize").global_block().ops].count("pd_op.scale_")
    return {
        "weights": max(float(abs(found[n] - after[n]).max() / abs(after[n] - before[n]).max()) for n in after),
        "scales": scales,
        "parameters": len(after),
    }


if __name__ == "__main__":
    paddle.set_device("cpu")
    cases, out = sys.argv[1:]
    if dist.get_world_size() > 1:
        dist.init_parallel_env()
    found = {name: compare(case) for name, case in json.loads(cases).items()}
    if dist.get_rank() == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(found, file)
