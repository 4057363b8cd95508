"""In dygraph a plan's ZeRO stage and recomputation are applied, and what trains is the serial model."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from launching import launch
from paddle import nn
from paddle.static import InputSpec

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.errors import PlanError, TunerError
from paddle_rbt_plugin.handover.dygraph import optimizer as dygraph_optimizer
from paddle_rbt_plugin.handover.dygraph.recompute import blocks

SOME = "Momentum, stage 1;Momentum, stage 0;Lamb, stage 0;stage 2;clip;clip, stage 2;groups;accumulation, stage 2;recomputation"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "processes", "cases"),
    [('{"dp": 2, "mp": 1}', 2, "all"), ('{"dp": 1, "mp": 2}', 2, SOME), ('{"dp": 2, "mp": 2}', 4, SOME)],
    ids=["dp2", "mp2", "dp2 x mp2"],
)
def test_weights_states_and_losses_are_the_serial_ones_and_states_are_divided(degrees, processes, cases, tmp_path) -> None:
    found = launch("dygraph_training.py", processes, tmp_path / "out.json", degrees, cases, timeout=600)
    assert len(found) == (35 if cases == "all" else 9)
    for name, seen in found.items():
        half = name == "master weights"  # a rounding of bfloat16 more or less
        assert seen["losses"] < (1e-3 if half else 5e-6), name
        assert seen["weights"] < (5e-3 if half else 1e-4), name
        assert seen["states"] < (5e-3 if half else 1e-6), name
        assert all(seen[after] < 1e-4 for after in ("resumed from serial", "resumed") if after in seen), name
        parts = (
            processes if "stage 0" not in name and name != "recomputation" else processes // (2 if '"dp": 2' in degrees else 1)
        )
        if name == "Lamb, stage 0":  # Paddle keeps its states itself
            parts = 1
        assert seen["held"] <= seen["whole"] / parts * 1.1 + 4, name
        if not half:
            assert seen["runs"] == (6 if "recomputation" in name else 3), name


@pytest.mark.slow
def test_a_plan_that_the_script_does_not_apply_is_warned_about(tmp_path: Path) -> None:
    found = launch("dygraph_warnings.py", 2, tmp_path / "out.json")
    assert len(found["not sharded"]) == 1
    assert "ZeRO stage 2" in found["not sharded"][0] and "plan.shard_optimizer(optimizer)" in found["not sharded"][0]
    assert found["sharded"] == []
    assert "its states cannot be divided" in found["Lamb"]
    assert found["after steps"] == [], "the states that are there are divided, too"
    assert found["moments after steps"] == [[8, 32], [16], [16, 16], [8]]
    assert "no parameter that plan.shard_layer has sharded" in found["other parameters"]
    assert "pass the optimizer itself" in found["wrapped"]


class Block(nn.Layer):
    def __init__(self, width: int = 8):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)


def test_the_layers_of_a_plan_are_those_of_a_list() -> None:
    class Plain(nn.Layer):
        def __init__(self):
            super().__init__()
            self.layers, self.norms = nn.LayerList([Block() for _ in range(3)]), nn.LayerList([nn.LayerNorm(8)])

    class Sequence(nn.Layer):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Embedding(5, 8), Block(), Block(), nn.LayerNorm(8))

    class Two(nn.Layer):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = Plain(), Sequence()

    for model, count in ((Plain(), 3), (Sequence(), 2)):
        assert [type(block) for block in blocks(model, count)] == [Block] * count
    assert len(blocks(Two(), 5)) == 5
    with pytest.raises(PlanError, match=r"layers of 4, and Plain does not show which .* 3 x Block.*'recompute': 'none'"):
        blocks(Plain(), 4)


PLANNED = rbt.plan.plan.TensorPlacement(0, (0, -1), kind="data", shape=(8, 4))


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A loader for two replicas, which gives what it would cut."""
    from paddle_rbt_plugin.handover.dygraph import sharding as dygraph

    monkeypatch.setattr(dygraph, "paddle_mesh", lambda mesh: SimpleNamespace(shape=[2]))
    monkeypatch.setattr(dygraph.dist, "shard_tensor", lambda tensor, *_, **__: tensor)
    stage = SimpleNamespace(process_mesh=None)
    return dygraph.ShardedLoader(SimpleNamespace(stages=[stage], tensors={"x": PLANNED, "y": PLANNED}), [])


X, Y = np.ones([8, 4], "float32"), np.zeros([8, 4], "float32")


@pytest.mark.parametrize(
    "batch",
    [[X, Y], (X, [Y]), {"x": X, "y": Y}, [{"y": Y}, X], {"inputs": [X, Y]}, [X[:6], Y[:6]], {"x": X.tolist(), "y": Y}],
)
def test_batches_come_as_lists_dicts_and_both(loader: Any, batch: Any) -> None:
    values = paddle.utils.flatten(loader.shard(batch))
    assert sorted(float(v.mean()) for v in values) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([X[0], Y], r"has the shape \[4\] for the input 'x', which was planned with the shape \[8, 4\]"),
        ({"x": X, "y": Y[None]}, r"has the shape \[1, 8, 4\] for the input 'y'"),
        ([X, Y[:5]], r"shape \[5, 4\] for the input 'y' cannot be split over 2 ranks in dimension 0; .*drop_last"),
        ([X], "fewer tensors than the 2 inputs of the program"),
        ([X, Y, X], r"more tensors than the 2 inputs of the program \(x, y\)"),
        ({"x": X}, "lacks the input 'y'"),
        ({"x": X, "z": Y}, "places no input 'z'; the program reads x, y"),
        ({"x": X, "y": [[1, 2], [3]]}, "for the input 'y' cannot be converted to a tensor"),
        ([X, "text"], "has the shape|cannot be converted"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_with_its_input_and_what_was_planned(
    loader: Any, batch: Any, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        loader.shard(batch)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"sharding_stage": 3}, r"ZeRO stage 3, but dygraph supports only stages 0, 1, 2; .*'sharding_stage': \[0, 1, 2\]"),
        ({"sharding_stage": 1, "sharding_degree": 2}, r"over 2 of 4 replicas, .*'sharding_degree': 'whole'"),
    ],
)
def test_a_stage_that_dygraph_does_not_run_is_refused(space: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    spec = [InputSpec([8, 16], "float32", "x")]
    fixed = {"dp": 4, "mp": 1, "pp": 1}
    plan = rbt.tune(model, input_spec=spec, loss=lambda x: x.mean(), cluster="1x4:A100-80G", search_space=fixed | space)
    with pytest.raises(TunerError, match=message):
        plan.shard_layer(model)
    with pytest.raises(TunerError, match=message):
        plan.shard_optimizer(paddle.optimizer.SGD(parameters=model.parameters()))


def test_an_optimizer_of_plain_parameters_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dygraph_optimizer, "_meshes", [])
    dygraph_optimizer.adopt_optimizers(dist.ProcessMesh([0], dim_names=["dp"]), [], 1)
    layer = nn.Linear(4, 4)
    optimizer = paddle.optimizer.Momentum(parameters=layer.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(paddle.ones([2, 4])).sum().backward()
        optimizer.step()
    assert type(optimizer) is paddle.optimizer.Momentum
