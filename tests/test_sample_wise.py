"""Ops that treat samples one by one keep the batch sharded, in plans and in training, and none of them ends the process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from launching import launch_all
from paddle import nn
from paddle.nn import functional as F
from paddle.static import InputSpec

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.graph.einsum import einsum_steps
from paddle_rbt_plugin.handover.passes import apply_plan
from paddle_rbt_plugin.handover.pir.trace import trace_layer
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import analyse


class Images(nn.Layer):
    """Convolution, something else, and a head."""

    def __init__(self, between: Callable[[Any], Any]) -> None:
        super().__init__()
        self.conv, self.head, self.between = nn.Conv2D(3, 8, 3, padding=1), nn.Linear(8, 4), between

    def forward(self, x: Any) -> Any:
        return self.head(self.between(self.conv(x)).mean([2, 3])).square().mean()


IMAGES: dict[str, Callable[[Any], Any]] = {
    "max pool": lambda h: F.max_pool2d(h, 2),
    "adaptive pool": lambda h: F.adaptive_avg_pool2d(h, 2),
    "pool with places": lambda h: F.max_pool2d(h, 2, return_mask=True)[0],
    "bilinear": lambda h: F.interpolate(h, scale_factor=2, mode="bilinear"),
    "bicubic": lambda h: F.interpolate(h, scale_factor=2, mode="bicubic"),
    "nearest": lambda h: F.interpolate(h, size=[9, 9]),
    "pixel shuffle": lambda h: F.pixel_shuffle(F.pixel_unshuffle(h, 2), 2),
    "channel shuffle": lambda h: F.channel_shuffle(h, 2),
    "instance norm": lambda h: F.instance_norm(h),
    "reflected padding": lambda h: F.pad(h, [1, 1, 1, 1], mode="reflect"),
    "argmax": lambda h: h * h.argmax(axis=1, keepdim=True).astype("float32"),
    "argmin": lambda h: h * h.argmin(axis=2, keepdim=True).astype("float32"),
    "einsum": lambda h: paddle.einsum("bchw,bdhw->bcdw", h, h),
    "maxout": lambda h: paddle.concat([F.maxout(h, 2)] * 2, 1),
}


def images(between: Callable[[Any], Any]) -> Any:
    return trace_layer(Images(between), [InputSpec([8, 3, 8, 8], "float32", "x")])


@pytest.mark.parametrize("between", IMAGES.values(), ids=IMAGES)
def test_the_batch_stays_sharded(between: Callable[[Any], Any]) -> None:
    trace = images(between)
    plan = rbt.tune(trace.program, cluster="1x8:A100-80G", search_space={"dp": 8})
    one = rbt.tune(trace.program, cluster="1x1:A100-80G", search_space={"dp": 1}, global_batch=8)
    assert plan.estimate.memory["activations"] < 0.3 * one.estimate.memory["activations"]
    assert not any("no sharding rule" in note for note in plan.notes)


@pytest.mark.parametrize("cell", [nn.SimpleRNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_are_planned_data_parallel_and_refused_by_engines(cell: Any) -> None:
    class Network(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = cell(16, 16, num_layers=2), nn.Linear(16, 4)

        def forward(self, x: Any) -> Any:
            return self.head(self.cell(x)[0]).square().mean()

    trace = trace_layer(Network(), [InputSpec([8, 12, 16], "float32", "x")])
    plan = rbt.tune(trace.program, cluster="1x4:A100-80G")
    assert plan.degrees == {"pp": 1, "dp": 4, "mp": 1}
    assert not any("no sharding rule" in note for note in plan.notes)
    with pytest.raises(rbt.UnsupportedProgram, match="cannot train 'rnn' in distributed static programs"):
        _annotated(trace, plan)


def _annotated(trace: Any, plan: rbt.Plan) -> None:
    placements = {name: t.placement for name, t in plan.leaves(trace.graph).items()}
    apply_plan(trace.program, plan, placements)


EQUATIONS = {
    "ij,jk->ik": [(3, 4), (4, 5)],
    "bij,bjk->bik": [(2, 3, 4), (2, 4, 5)],
    "bthd,bshd->bhts": [(2, 3, 4, 5), (2, 6, 4, 5)],
    "bsd,dhk->bshk": [(2, 3, 4), (4, 5, 6)],
    "bhqk,bkhd->bqhd": [(2, 3, 4, 5), (2, 5, 3, 6)],
    "bchw,cd->bd": [(2, 3, 4, 5), (3, 6)],
    "...ij,jk->...ik": [(2, 3, 4, 5), (5, 6)],
    "i,j->ij": [(3,), (4,)],
    "i,i->": [(3,), (3,)],
    "ij,ij->ij": [(3, 4), (3, 4)],
    "ijk->ki": [(3, 4, 5)],
    "ij->": [(3, 4)],
    "ij,jk": [(3, 4), (4, 5)],
    "ba,cb": [(3, 4), (5, 3)],
}


@pytest.mark.parametrize(("equation", "shapes"), EQUATIONS.items(), ids=EQUATIONS)
def test_einsum_is_sums_and_a_product(equation: str, shapes: list[tuple[int, ...]]) -> None:
    random = np.random.default_rng(1)
    arrays = [random.standard_normal(shape).astype("float32") for shape in shapes]
    steps = einsum_steps(equation, shapes, "float32")
    values: list[np.ndarray] = []
    for step in steps:
        x, *others = (arrays[-1 - ref] if ref < 0 else values[ref] for ref in step.inputs.values())
        made = {
            "matmul": lambda x, y: x @ y,
            "transpose": lambda x: x.transpose(step.attrs["perm"]),  # noqa: B023
            "reshape": lambda x: x.reshape(step.attrs["shape"]),  # noqa: B023
            "sum": lambda x: x.sum(step.attrs["axis"]),  # noqa: B023
        }[step.type](x, *others)
        assert made.shape == tuple(step.shape)
        values.append(made)
    np.testing.assert_allclose(values[-1], np.einsum(equation, *arrays), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [("ii->i", [(3, 3)]), ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)])],
    ids=["diagonal", "three operands"],
)
def test_other_einsums_are_refused_by_name(equation: str, shapes: list[list[int]]) -> None:
    assert einsum_steps(equation, shapes, "float32") == ()


def test_attention_by_einsum_is_matched() -> None:
    class Attention(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

        def forward(self, x: Any) -> Any:
            q, k, v = (p(x).reshape([0, 0, 4, 8]) for p in (self.q, self.k, self.v))
            weights = F.softmax(paddle.einsum("bqhd,bkhd->bhqk", q, k) * 0.3)
            return self.out(paddle.einsum("bhqk,bkhd->bqhd", weights, v).reshape([0, 0, 32])).square().mean()

    graph = trace_layer(Attention(), [InputSpec([2, 8, 32], "float32", "x")]).graph
    assert {m.pattern for m in analyse(graph, load_plugins().patterns).matches.matches} >= {"qkv", "row_matmul"}


@pytest.mark.slow
def test_two_replicas_train_the_serial_model(tmp_path: Path) -> None:
    for rank, found in enumerate(launch_all("sample_wise.py", 2, tmp_path / "found", timeout=600)):
        failed = {name: text for name, text in found.items() if isinstance(text, str)}
        assert not failed, f"rank {rank}: {failed}"
        assert {name: d for name, d in found.items() if d["loss"] > 1e-4 or d["weight"] > 1e-3} == {}
