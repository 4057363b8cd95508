"""ZeRO stages 1 and 2: what a plan divides over the replicas is divided in Paddle's program, and trains to the serial loss."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from launching import launch
from paddle.distributed.fleet import auto

from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.pir.trace import Trace, trace_layer
from paddle_rbt_plugin.handover.pir.verification import StageComparison, verify
from paddle_rbt_plugin.handover.pir.zero import constraint, stage_of
from paddle_rbt_plugin.handover.shared.zero import shard_dimension
from paddle_rbt_plugin.models import GPTConfig, LlamaConfig, build, input_spec
from paddle_rbt_plugin.request import Request
from paddle_rbt_plugin.tuner import tune_graph

BATCH = 8
MODELS = {
    "gpt": GPTConfig(layers=4, hidden=64, ffn=256, heads=8, vocab=128, seq=16),  # its head is tied
    "llama": LlamaConfig(layers=4, hidden=64, ffn=256, heads=8, kv_heads=4, vocab=128, seq=16),
    "odd vocabulary": GPTConfig(layers=4, hidden=64, ffn=256, heads=8, vocab=127, seq=16),
}
SPACES = {
    "dp2": {"dp": 2},
    "dp8": {"dp": 8},
    "dp2 x mp2": {"dp": 2, "mp": 2},
    "mp2 x dp2": {"dp": 2, "mp": 2, "order": "mp_dp"},
    "pp2 x dp2 x mp2": {"pp": 2, "dp": 2, "mp": 2},
    "pp2 x mp2 x dp2": {"pp": 2, "dp": 2, "mp": 2, "order": "mp_dp"},
    "pp2 x dp2 of 2 chunks": {"pp": 2, "dp": 2, "vpp": 2},
}


@cache
def traced(model: str) -> Trace:
    with paddle.LazyGuard():
        layer = build(MODELS[model])
    return trace_layer(layer, input_spec(MODELS[model], BATCH))


def verified(model: str, name: str, stage: int) -> list[StageComparison]:
    degrees = {"pp": 1, "dp": 1, "mp": 1, "recompute": "none", "sharding_stage": stage} | SPACES[name]
    cluster = f"1x{degrees['pp'] * degrees['dp'] * degrees['mp']}:A100-80G"
    plan = tune_graph(traced(model).graph, Request(Settings(cluster=cluster, search_space=degrees), global_batch=BATCH * 4))
    return verify(plan, traced(model).graph, traced(model).program)


def along_dp(compared: StageComparison) -> Counter[tuple[str, str]]:
    """Phase and kind of what the program sends along dp."""
    found: Counter[tuple[str, str]] = Counter()
    for (phase, kind, axis, _), n in compared.found.collectives.items():
        if axis == "dp":
            found[phase, kind] += n
    return found


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("model", "name"),
    [("gpt", name) for name in SPACES]
    + [("llama", name) for name in ("dp2", "mp2 x dp2", "pp2 x dp2 x mp2")]
    + [("odd vocabulary", name) for name in ("dp2", "dp8", "pp2 x dp2 of 2 chunks")],
)
def test_collectives_gradients_and_states_of_the_program_are_as_predicted(model: str, name: str, stage: int) -> None:
    for compared in verified(model, name, stage):
        assert compared.differences == ()


def test_each_stage_divides_what_it_divides() -> None:
    (whole,), (first,), (second,) = (verified("gpt", "dp2", stage) for stage in (0, 1, 2))
    assert first.found.optimizer_bytes == second.found.optimizer_bytes == whole.found.optimizer_bytes / 2
    assert first.found.gradient_bytes == whole.found.gradient_bytes == 2 * second.found.gradient_bytes
    n = along_dp(whole)["optimizer", "all_reduce"]
    assert along_dp(whole) - along_dp(first) == {("optimizer", "all_reduce"): n}
    assert along_dp(first) - along_dp(whole) == {("optimizer", "reduce_scatter"): n, ("optimizer", "all_gather"): n}
    assert along_dp(second) - along_dp(whole) == {("backward", "reduce_scatter"): n, ("optimizer", "all_gather"): n}


def test_states_lie_in_the_first_dimension_that_is_whole_and_divides() -> None:
    assert shard_dimension((50257, 4096), (-1, -1), 0, 8) == 1
    assert shard_dimension((4096, 1024), (1, -1), 0, 8) == 1
    assert shard_dimension((4096, 1024), (-1, 0), 1, 8) == 0
    assert shard_dimension((1, 7), (-1, -1), 0, 2) is None
    assert shard_dimension((8,), (0,), 1, 2) is None
    assert shard_dimension((8, 8), (0, -1), 0, 2) is None  # experts that are divided over the replicas
    assert shard_dimension((8, 8), (-1, -1), 0, 1) is None


def strategy(stage: int | None = None, amp: str = "") -> auto.Strategy:
    made = auto.Strategy()
    if stage is not None:
        made.sharding.enable, made.sharding.stage = True, stage
    if amp:
        made.amp.enable, made.amp.dtype = True, amp
    return made


def optimizer(name: str = "AdamW") -> paddle.optimizer.Optimizer:
    return getattr(paddle.optimizer, name)(1e-3, parameters=paddle.nn.Linear(2, 2).parameters())


def allowed(*args: object) -> tuple[int, ...]:
    return constraint(*args).values["sharding_stage"]


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_a_strategy_that_says_nothing_leaves_the_stage_to_the_planner(name: str) -> None:
    assert allowed(strategy(), optimizer(name)) == (0, 1, 2)
    assert allowed(strategy(amp="bfloat16"), optimizer(name)) == (0, 1, 2)
    assert allowed(strategy(2), optimizer(name)) == (2,)


@pytest.mark.parametrize("stage", [0, 3])
def test_stages_that_are_not_handed_over_are_refused(stage: int) -> None:
    with pytest.raises(TunerError, match=rf"stage is {stage}, but PIR programs are trained under ZeRO stages 1 and 2"):
        constraint(strategy(stage), optimizer())


@pytest.mark.parametrize(
    ("amp", "name", "reason"),
    [("", "Lamb", "training with Lamb"), ("float16", "AdamW", "loss scaling"), ("", "", "without an optimizer")],
)
def test_what_cannot_be_divided_stays_whole_with_the_reason(amp: str, name: str, reason: str) -> None:
    given = optimizer(name) if name else None
    limit = constraint(strategy(amp=amp), given)
    assert limit.values["sharding_stage"] == (0,) and reason in limit.reason
    with pytest.raises(TunerError, match=f"stage 1, but this is .*{reason}"):
        constraint(strategy(1, amp), given)


def test_an_optimizer_that_divides_its_own_states_is_left_alone() -> None:
    mesh = dist.ProcessMesh([0, 1], dim_names=["dp"])
    kinds = {1: dist.ShardingStage1("dp", mesh), 2: dist.ShardingStage2("dp", mesh)}
    for shard_fn in kinds.values():
        limit = constraint(strategy(), SimpleNamespace(_shard_fn=shard_fn))
        assert limit.values["sharding_stage"] == (1,) and "dist.shard_optimizer" in limit.reason
    plan = SimpleNamespace(sharding_stage=1)
    assert stage_of(plan, strategy(), SimpleNamespace(_shard_fn=kinds[1])) == 0
    with pytest.raises(TunerError, match="ZeRO stage 3, which is not planned"):
        constraint(strategy(), SimpleNamespace(_shard_fn=dist.ShardingStage3("dp", mesh)))


def test_a_loaded_plan_is_trained_at_a_stage_that_the_job_allows() -> None:
    plan = SimpleNamespace(sharding_stage=2)
    assert stage_of(plan, strategy(), optimizer()) == 2
    assert stage_of(plan, strategy(1), optimizer()) == 1
    assert stage_of(plan, strategy(), optimizer("Lamb")) == 0
    assert stage_of(SimpleNamespace(sharding_stage=3), strategy(), optimizer()) == 0


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["engine", "to_static"])
@pytest.mark.parametrize("stage", [1, 2])
def test_divided_states_train_to_the_serial_loss(tmp_path: Path, entry: str, stage: int) -> None:
    """With clipping by the global norm, which needs the norm of all shards."""
    serial, result = trained(tmp_path, entry, 1, 0.5, stage)
    assert result["plan"]["sharding_stage"] == stage
    assert [16] in result["moments"] and [64] not in result["moments"]  # of biases of 32 and 64
    np.testing.assert_allclose(result["losses"], serial["losses"], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_accumulated_gradients_train_to_the_serial_loss(tmp_path: Path, stage: int) -> None:
    serial, result = trained(tmp_path, "engine", 2, 0.0, stage)
    assert (result["plan"]["sharding_stage"], result["plan"]["accumulate_steps"]) == (stage, 2)
    np.testing.assert_allclose(np.mean(result["losses"], axis=1), serial["losses"], rtol=0, atol=1e-5)


def trained(folder: Path, entry: str, steps: int, clip: float, stage: int) -> tuple[dict, dict]:
    """Three updates in one process, and in two with the states divided."""
    for name in ("serial", "divided"):
        (folder / name).mkdir()
    space = json.dumps({"dp": 2, "recompute": "none"})
    serial = launch("zero.py", 1, folder / "serial" / "result.json", entry, "{}", "1", str(clip), "0")
    settings = (entry, space, str(steps), str(clip), str(stage))
    return serial, launch("zero.py", 2, folder / "divided" / "result.json", *settings)
