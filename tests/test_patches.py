"""Paddle still needs every patch: each test fails on the day the patch can go."""

from __future__ import annotations

import inspect

import paddle
import paddle.distributed as dist
import pytest
from paddle import nn
from paddle.distributed.auto_parallel import api
from paddle.distributed.auto_parallel.static import process_group
from paddle.distributed.auto_parallel.static.engine import Engine
from paddle.jit import dy2static
from paddle.static import InputSpec

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover import patches


def test_without_native_tracing_every_function_is_transcribed() -> None:
    seen = []
    original = dy2static.Call
    dy2static.Call = lambda function: seen.append(function) or original(function)
    try:
        layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        traced = paddle.jit.to_static(layer.forward, full_graph=True, input_spec=[InputSpec([2, 4], "float32", "x")])
        assert traced.concrete_program is not None
    finally:
        dy2static.Call = original
    assert seen


def test_native_tracing_restores_what_it_replaces_even_after_an_error() -> None:
    original = dy2static.Call
    with pytest.raises(ValueError), patches.native_tracing():
        assert dy2static.Call is not original
        raise ValueError
    assert dy2static.Call is original


def test_process_groups_of_a_cpu_build_assert_a_cuda_device() -> None:
    assert "is_compiled_with_cuda" in inspect.getsource(process_group.ProcessGroup.instantiate)


def test_a_cpu_mesh_with_two_active_axes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    mesh = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])
    with pytest.raises(TunerError, match="two active axes"):
        patches.enable_static_training_on_cpu([mesh])


def test_a_single_process_is_left_alone() -> None:
    before = process_group.ProcessGroup.instantiate
    patches.enable_static_training_on_cpu([dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])])
    assert process_group.ProcessGroup.instantiate is before


def test_the_distributed_strategy_of_paddle_has_no_tuning_of_its_own() -> None:
    assert "tuning" not in inspect.getsource(inspect.unwrap(api.Strategy.__init__))
    assert "tuning" not in inspect.getsource(inspect.unwrap(api.DistModel._DistModel__convert_strategy))


def test_the_distributed_strategy_takes_tuning_from_a_dict_or_an_attribute() -> None:
    strategy = dist.Strategy({"tuning": {"enable": True, "pass_name": "rule_based_tuner", "search_space": {"mp": 2}}})
    assert strategy.tuning.enable and strategy.tuning.search_space == {"mp": 2}
    other = dist.Strategy()
    assert not other.tuning.enable and other.tuning.pass_name is None


@pytest.mark.parametrize("name", ["_prepare_dataloader", "_prepare_logger", "_prepare_reader"])
def test_the_methods_that_fit_calls_still_read_the_contexts_that_pir_leaves_empty(name: str) -> None:
    original = inspect.unwrap(getattr(Engine, name))
    assert "_dist_contexts" in inspect.getsource(original)


def test_the_optimizer_of_an_engine_still_comes_from_a_context() -> None:
    assert "dist_context" in inspect.getsource(inspect.unwrap(Engine.optimizer.fget))
