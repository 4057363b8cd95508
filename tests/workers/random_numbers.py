"""What random ops draw on each of two ranks, and what a model trains to whose layers drop out; every rank writes JSON.

python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo random_numbers.py OUT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.nn import functional as F
from paddle.static import InputSpec

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.cluster import ProcessMesh
from paddle_rbt_plugin.completion import Placement
from paddle_rbt_plugin.handover.dygraph import random as dygraph_random
from paddle_rbt_plugin.handover.pir.partitioning import partition, resolve
from paddle_rbt_plugin.handover.pir.replay import annotate
from paddle_rbt_plugin.handover.pir.seeds import draws_from_device, stream_names
from paddle_rbt_plugin.handover.shared.conversion import paddle_mesh, paddle_placements
from paddle_rbt_plugin.handover.shared.engine_random import streams_of
from paddle_rbt_plugin.handover.shared.gloo import enable_static_training_on_cpu
from paddle_rbt_plugin.handover.shared.random_streams import Source, Streams

MESH = ProcessMesh(("mp",), (2,), (0, 1))
SHAPE = [8, 16]
SHARDED = {"rows": Placement((0, -1)), "columns": Placement((-1, 0)), "replicated": Placement((-1, -1))}
OPS: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "another dropout": lambda x: F.dropout(x, 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5),
    "bernoulli": paddle.bernoulli,
    "poisson": lambda x: paddle.poisson(x * 9.0),
    "uniform": lambda x: x * 0.0 + paddle.rand(SHAPE),
    "gaussian": lambda x: x * 0.0 + paddle.randn(SHAPE),
    "randint": lambda x: x * 0.0 + paddle.randint(0, 1000, SHAPE).cast("float32"),
    "randperm": lambda x: x * 0.0 + paddle.randperm(16).cast("float32"),
    "multinomial": lambda x: paddle.multinomial(x, 6, replacement=True).cast("float32"),
    "gumbel_softmax": F.gumbel_softmax,
    "rrelu": lambda x: F.rrelu(-x, training=True),
}
"""Each on values between 0 and 1."""


def probabilities() -> np.ndarray:
    return np.random.default_rng(0).uniform(0.25, 0.75, SHAPE).astype("float32")


def local(values: np.ndarray, placement: Placement) -> np.ndarray:
    for dim, axis in enumerate(placement.dims_mapping):
        if axis == 0:
            values = np.split(values, 2, axis=dim)[dist.get_rank()]
    return np.ascontiguousarray(values)


def static_draws(placement: Placement, runs: int = 2) -> list[dict[str, Any]]:
    """By run and op what this rank draws in an annotated program."""
    enable_static_training_on_cpu([paddle_mesh(MESH)])
    paddle.enable_static()
    program = paddle.static.Program()
    with paddle.static.program_guard(program):
        x = paddle.static.data("x", SHAPE, "float32")
        for name, op in OPS.items():
            paddle._pir_ops.set_persistable_value(op(x), name)
    annotate(program, MESH, {"x": placement})
    dense = resolve(partition(program, train=False))
    paddle.enable_static()
    paddle.base.libpaddle.pir.apply_dist2dense_pass(dense)
    streams = Streams(Source(7), stream_names(dense), "" if draws_from_device(dense) else None)
    executor = paddle.static.Executor(paddle.CPUPlace())
    fetched = [dense.get_output_value_by_name(name) for name in OPS]
    found = []
    for _ in range(runs):
        with streams.of_next_step():
            values = executor.run(dense, feed={"x": local(probabilities(), placement)}, fetch_list=fetched)
        found.append({name: np.asarray(v).tolist() for name, v in zip(OPS, values, strict=True)})
    paddle.disable_static()
    return found


class Drawing(nn.Layer):
    """Draws from every op in its forward pass."""

    def forward(self, x: Any) -> list[Any]:
        return [op(x) for op in OPS.values()]


def dygraph_draws(placement: Placement, runs: int = 2) -> list[dict[str, Any]]:
    """By run and op what this rank draws in dygraph."""
    model = Drawing()
    dygraph_random.draw_by_shard(model, MESH)
    x = dist.shard_tensor(paddle.to_tensor(probabilities()), paddle_mesh(MESH), paddle_placements(placement, 1))
    found = []
    for run in range(runs):
        if run and dist.get_rank() == 0:
            paddle.rand([3])  # what a script of one rank draws must not matter
        values = [v._local_value() if v.is_dist() else v for v in model(x)]
        found.append({name: v.numpy().tolist() for name, v in zip(OPS, values, strict=True)})
    return found


class Block(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)
        self.inner, self.outer = nn.Dropout(0.3), nn.Dropout(0.3)

    def forward(self, x: Any) -> Any:
        hidden = self.inner(F.gelu(self.up(self.norm(x))))
        noise = 0.1 * paddle.randn([8, 16])
        return x + self.outer(self.down(hidden)) + noise * x


class Model(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.LayerList([Block() for _ in range(3)])
        self.head = nn.Linear(16, 4)
        self.register_buffer("shift", paddle.rand([16]))

    def forward(self, x: Any) -> Any:
        x = x + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def complaint(check: Callable[[], None]) -> str:
    """What a check raises; empty where it raises nothing."""
    try:
        check()
    except rbt.HandoverError as error:
        return str(error)
    return ""


def trained(seed: int | None, space: dict[str, Any], mode: str = "static", steps: int = 3) -> dict[str, Any]:
    """Losses, and the sums of the local weights, of a model that trains under a plan of ``space``."""
    paddle.seed(np.random.SeedSequence().entropy % 2**31 if seed is None else seed)
    model = Model()
    loss = nn.CrossEntropyLoss()
    random = np.random.default_rng(0)
    batch = [random.standard_normal([8, 16]).astype("float32"), random.integers(0, 4, [8, 1])]
    specs = [InputSpec([8, 16], "float32", "x")], [InputSpec([8, 1], "int64", "y")]
    if mode == "dygraph":
        plan = rbt.tune(model, input_spec=specs[0], loss=loss, labels_spec=specs[1], search_space=space)
        plan.shard_layer(model)
        assert plan.recompute == space["recompute"]
        optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
        losses = []
        for x, y in plan.shard_dataloader([batch] * steps):
            value = loss(model(x), y)
            value.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(float(value.numpy()))
        weights = {n: float(p._local_value().abs().sum().numpy()) for n, p in model.named_parameters()}
        checked = complaint(lambda: plan.check_replicas(model))
        if dist.get_rank() == 1:
            model.blocks[1].norm.bias._local_value().add_(paddle.ones([1]))
        changed = complaint(lambda: plan.check_replicas(model))
        placed = {n: [str(p) for p in t.placements] for n, t in model.named_parameters()}
        whole = [n for n, p in placed.items() if "Shard" not in str(p)]
        return {"losses": losses, "weights": weights, "replicated": whole, "checked": checked, "changed": changed}
    names = {p.name: n for n, p in model.named_parameters()}
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    strategy = dist.Strategy({"tuning": {"enable": True, "pass_name": "rule_based_tuner", "search_space": space}})
    engine = dist.to_static(model, None, loss, optimizer, strategy, input_spec=[list(spec) for spec in specs])
    engine.train()
    plan = rbt.engine_plan(engine)
    losses = [float(engine(*part)) for part in plan.shard_dataloader([batch] * steps)]
    scope = paddle.static.global_scope()
    tensors = {k: np.array(scope.find_var(n).get_tensor()) for n, k in names.items()}
    checked = complaint(lambda: rbt.check_replicas(engine))
    if dist.get_rank() == 1:
        bias = scope.find_var(next(n for n, k in names.items() if k == "blocks.1.norm.bias")).get_tensor()
        bias.set(np.array(bias) + 1, paddle.CPUPlace())
    changed = complaint(lambda: rbt.check_replicas(engine))
    ops = [op for op in engine.dist_main_program("train").global_block().ops if op.has_attr("bwd_recompute_id")]
    return {
        "losses": losses,
        "weights": {k: float(np.abs(t).sum()) for k, t in tensors.items()},
        "replicated": [names[n] for n, t in plan.tensors.items() if n in names and not t.placement.is_sharded()],
        "checked": checked,
        "changed": changed,
        "recomputed": sorted({op.name().removeprefix("pd_op.") for op in ops}),
        "streams": len(streams_of(engine._engine, "train").names),
    }


def run() -> dict[str, Any]:
    mp, dp = ({"mp": 2, "dp": 1, "pp": 1, "recompute": "none"}, {"mp": 1, "dp": 2, "pp": 1, "recompute": "none"})
    rank = dist.get_rank()
    return {
        "dygraph": {name: dygraph_draws(placement) for name, placement in SHARDED.items()},
        "static": {name: static_draws(placement) for name, placement in SHARDED.items()},
        "mp": trained(5, mp),
        "mp again": trained(5, mp),
        "mp other": trained(6, mp),
        "mp full": trained(5, {**mp, "recompute": "full"}),
        "dp": trained(5, dp),
        "dp full": trained(5, {**dp, "recompute": "full"}),
        "unseeded": trained(None, mp),
        "seeded apart": trained(100 + rank, dp),
        "dygraph mp": trained(5, mp, "dygraph"),
        "dygraph mp again": trained(5, mp, "dygraph"),
        "dygraph mp full": trained(5, {**mp, "recompute": "full"}, "dygraph"),
        "dygraph unseeded": trained(None, mp, "dygraph"),
    }


if __name__ == "__main__":
    paddle.set_device("cpu")
    dist.init_parallel_env()
    paddle.seed(1 + dist.get_rank())
    Path(f"{sys.argv[1]}.{dist.get_rank()}").write_text(json.dumps(run()), encoding="utf-8")
