"""A plan is used for the program, the batch and the engine that it was made for, and for no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest
from launching import launch
from paddle import nn
from paddle.distributed.fleet import auto
from paddle.static import InputSpec

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.graph import read_program
from paddle_rbt_plugin.handover.legacy.engine import with_paths_of_job
from paddle_rbt_plugin.handover.pir.trace import trace_layer
from paddle_rbt_plugin.handover.shared.engine_state import own_strategy, pass_attributes

CLUSTER = "1x2:A100-80G"


class Network(nn.Layer):
    """``between`` is applied to what the first layer makes."""

    def __init__(self, between: Callable[[Any], Any] = lambda x: x):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(64, 256), nn.Linear(256, 64), between

    def forward(self, x):
        return self.down(nn.functional.gelu(self.between(self.up(x)))).square().mean()


def without_gradient(x: Any) -> Any:
    with paddle.no_grad():
        return nn.functional.relu(x)


def frozen() -> Network:
    network = Network()
    for parameter in network.up.parameters():
        parameter.stop_gradient = True
    return network


def graph(network: nn.Layer) -> Any:
    return trace_layer(network, [InputSpec([8, 64], "float32", "x")]).graph


def tune(network: nn.Layer, **settings: Any) -> rbt.Plan:
    return rbt.tune(network, input_spec=[InputSpec([8, 64], "float32", "x")], cluster=CLUSTER, **settings)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Network(), frozen()),
        (Network(), Network(lambda x: x.detach())),
        (Network(nn.functional.relu), Network(without_gradient)),
        (nn.LayerNorm(64, weight_attr=False), nn.LayerNorm(64, bias_attr=False)),
    ],
    ids=["a frozen layer", "a detached value", "no_grad", "another slot of an operand"],
)
def test_the_signature_tells_programs_apart_that_train_otherwise(one: nn.Layer, other: nn.Layer) -> None:
    class Normed(nn.Layer):
        def __init__(self, norm: nn.Layer):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            return self.norm(x).square().mean()

    first, second = (graph(n if isinstance(n, Network) else Normed(n)) for n in (one, other))
    assert first.signature != second.signature
    assert first.signature == graph(one if isinstance(one, Network) else Normed(one)).signature


def test_data_that_asks_for_gradients_has_the_same_signature() -> None:
    x = InputSpec([8, 64], "float32", "x", stop_gradient=False)
    network = Network()
    program = paddle.jit.to_static(network.forward, full_graph=True, input_spec=[x]).concrete_program
    read = read_program(program.main_program)
    assert not read.data[0].stop_gradient
    assert read.signature == graph(Network()).signature


@pytest.mark.parametrize(("saved", "loaded", "word"), [(frozen, Network, "trains"), (Network, frozen, "freezes")])
def test_a_plan_of_a_half_frozen_model_is_not_loaded_for_the_trained_one_nor_the_reverse(saved, loaded, word, tmp_path) -> None:
    path = tmp_path / "plan.json"
    tune(saved(), save_path=path)
    with pytest.raises(rbt.PlanError, match=rf"another program: it {word} .*\.w_0, which the plan"):
        tune(loaded(), load_path=path)
    assert tune(saved(), load_path=path).to_dict() == json.loads(path.read_text()), "its own program has it"


def test_a_plan_with_a_signature_of_the_old_kind_is_loaded_with_a_warning(tmp_path: Path) -> None:
    path, network = tmp_path / "plan.json", Network()
    made = tune(network, save_path=path)
    old = json.loads(path.read_text()) | {"signature": graph(network).structure_signature}
    assert old["signature"] != made.signature
    path.write_text(json.dumps(old))
    with pytest.warns(rbt.TunerWarning, match=r"old signature.*plan again and save") as caught:
        loaded = tune(network, load_path=path)
    assert len(caught) == 1
    assert loaded.to_dict() == made.to_dict(), "and has the new one from then on"
    with pytest.raises(rbt.PlanError, match="another program"):
        tune(Network(nn.functional.relu), load_path=path)


def test_a_plan_of_another_global_batch_is_not_loaded(tmp_path: Path) -> None:
    path, program = tmp_path / "plan.json", trace_layer(Network(), [InputSpec([8, 64], "float32", "x")]).program
    rbt.tune(program, cluster=CLUSTER, global_batch=16, save_path=path)
    with pytest.raises(rbt.PlanError, match=r"for a global batch of 16 \(micro batch \d+, .*, not of 64; plan again"):
        rbt.tune(program, cluster=CLUSTER, global_batch=64, load_path=path)
    for same in (16, None):
        assert rbt.tune(program, cluster=CLUSTER, global_batch=same, load_path=path).global_batch == 16


def test_the_batch_of_a_job_that_loads_a_plan_is_the_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its strategy accumulates otherwise is warned about, since it is a setting of the job."""
    path = tmp_path / "plan.json"
    path.write_text("{}")
    tuning = {"enable": True, "pass_name": "rule_based_tuner", "cluster": "1x1:A100-80G"}
    strategy = auto.Strategy({"tuning": tuning, "gradient_merge": {"enable": True, "k_steps": 4}})
    engine = auto.Engine(Network(), strategy=strategy)
    engine._inputs_spec = [InputSpec([8, 64])]
    assert pass_attributes(engine, "train", [])["global_batch"] == 32
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"tuner_load_path": str(path)}))
    monkeypatch.setenv("PADDLE_AUTO_PARALLEL_CONFIG", str(config))
    assert "global_batch" not in with_paths_of_job(pass_attributes(engine, "train", []))
    strategy.tuning.load_path = str(path)
    assert "global_batch" not in pass_attributes(engine, "train", [])


def test_an_engine_writes_into_a_strategy_of_its_own() -> None:
    strategy = auto.Strategy()
    first, second = auto.Engine(Network(), strategy=strategy), auto.Engine(Network(), strategy=strategy)
    own_strategy(first).pipeline.enable = True
    assert own_strategy(first) is first._strategy is own_strategy(first)
    assert not strategy.pipeline.enable and not own_strategy(second).pipeline.enable


@pytest.mark.slow
def test_the_strategy_of_the_user_is_as_it_was_after_an_engine_was_prepared(tmp_path: Path) -> None:
    seen = launch("users_strategy.py", 1, tmp_path / "out.json")
    assert seen["before"] == seen["after"]
    assert seen["engine"] != seen["before"], "the engine's has what Paddle wrote into it"
