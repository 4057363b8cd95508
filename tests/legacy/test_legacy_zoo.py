"""Models of all kinds as legacy programs get a plan, or an error that says why not."""

from __future__ import annotations

import pytest
from legacy_models import LegacyProgram, legacy_program
from paddle import nn
from paddle.nn import functional as F
from paddle.static import InputSpec
from zoo import ZOO

import paddle_rbt_plugin as rbt

CLUSTER = "1x4:V100-32G"


class MLP(nn.Layer):
    """Four layers of matrix products; nothing of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LayerList([nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 64), nn.Linear(64, 10)])

    def forward(self, x, label):
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.cross_entropy(x, label)


class CNN(nn.Layer):
    """Convolutions and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LayerList([nn.Conv2D(3, 16, 3), nn.Conv2D(16, 16, 3)])
        self.head = nn.Linear(16, 10)

    def forward(self, x, label):
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.cross_entropy(self.head(x.mean([2, 3])), label)


class Elementwise(nn.Layer):
    """No pattern matches it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.create_parameter([16])

    def forward(self, x, y):
        return (x * self.scale - y).square().mean()


IMAGES = [InputSpec([8, 3, 16, 16], "float32", "x"), InputSpec([8, 1], "int64", "label")]


def planned(program: LegacyProgram) -> rbt.Plan | None:
    try:
        return rbt.tune(program.main, loss=program.loss, cluster=CLUSTER)
    except rbt.TunerError as error:
        assert len(str(error)) > 20
        return None


@pytest.mark.parametrize("name", list(ZOO))
def test_a_real_model_gets_a_plan_or_a_reason(name: str) -> None:
    model = ZOO[name]
    try:
        program = legacy_program(model.build, model.spec)
    except (AttributeError, TypeError, RuntimeError, ValueError, ImportError) as error:
        pytest.skip(f"this Paddle cannot build {name} as a legacy program: {str(error).strip().splitlines()[-1][:120]}")
    plan = planned(program)
    if plan is not None:
        assert set(plan.tensors) >= {p.name for p in program.main.all_parameters()}


def test_a_model_of_plain_layers_gets_a_plan() -> None:
    program = legacy_program(MLP, [InputSpec([8, 16], "float32", "x"), InputSpec([8, 1], "int64", "label")])
    assert planned(program) is not None


def test_a_model_of_convolutions_gets_a_plan() -> None:
    assert planned(legacy_program(CNN, IMAGES)) is not None


def test_a_model_without_any_match_is_data_parallel_and_says_so() -> None:
    program = legacy_program(Elementwise, [InputSpec([8, 16], "float32", name) for name in ("x", "y")])
    with pytest.warns(rbt.TunerWarning, match="no pattern matches"):
        plan = rbt.tune(program.main, loss=program.loss, cluster=CLUSTER)
    assert plan.degrees == {"pp": 1, "dp": 4, "mp": 1}
    assert plan.tensors["x"].dims_mapping == (0, -1)
    assert all(axis == -1 for p in plan.tensors.values() if p.kind == "param" for axis in p.dims_mapping)
