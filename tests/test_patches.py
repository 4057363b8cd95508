"""Paddle still needs every patch: each test fails on the day the patch can go."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys

import paddle
import paddle.distributed as dist
import pytest
from launching import WORKERS
from paddle import nn
from paddle.distributed.auto_parallel import api
from paddle.distributed.auto_parallel.static import engine, process_group
from paddle.distributed.auto_parallel.static.engine import Engine
from paddle.distributed.auto_parallel.static.mix_to_dist_pass import apply_mix2dist_pass
from paddle.distributed.auto_parallel.strategy import PipelineConfig
from paddle.distributed.passes import auto_parallel_recompute_pir
from paddle.distributed.passes.pipeline_scheduler_pass.pipeline_1f1b import Pipeline1F1BPass
from paddle.jit import dy2static
from paddle.static import InputSpec

from paddle_rbt_plugin.completion import Placement
from paddle_rbt_plugin.completion.oracle import set_placement
from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.pir import patches, seeds
from paddle_rbt_plugin.handover.pir.pipeline import annotate_stages
from paddle_rbt_plugin.handover.pir.structure import as_rank
from paddle_rbt_plugin.handover.pir.trace import trace_layer
from paddle_rbt_plugin.handover.shared import gloo
from paddle_rbt_plugin.models import GPTConfig, build, input_spec
from paddle_rbt_plugin.tuner import tune_graph


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
        gloo.enable_static_training_on_cpu([mesh])


def test_a_single_process_is_left_alone() -> None:
    before = process_group.ProcessGroup.instantiate
    gloo.enable_static_training_on_cpu([dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])])
    assert process_group.ProcessGroup.instantiate is before


def test_the_engine_gives_chunks_to_layers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    config = GPTConfig(layers=4, hidden=64, ffn=256, heads=8, vocab=128, seq=16)
    with paddle.LazyGuard():
        layer = build(config)
    trace = trace_layer(layer, input_spec(config, 8))
    space = {"pp": 2, "vpp": 2}
    plan = tune_graph(trace.graph, Settings(cluster="1x2:A100-80G", search_space=space), global_batch=32)
    settings = {"enable": True, "schedule_mode": "VPP", "pp_degree": 2, "vpp_degree": 2}
    program = trace.program.clone()
    annotate_stages(program, trace.graph, plan, {name: t.placement for name, t in plan.leaves(trace.graph).items()})
    apply_mix2dist_pass(program)
    with as_rank(0), pytest.raises(ValueError, match="vpp_seg_method"):
        engine.complete_chunk_id(program, paddle.static.Program(), PipelineConfig(settings | {"vpp_seg_method": ""}))


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 4])
def test_gradients_that_are_summed_over_chunks_are_refused_without_the_patch(pp: int) -> None:
    space = json.dumps({"pp": pp, "dp": 1, "mp": 1, "vpp": 2, "accumulate_steps": 2 * pp})
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(WORKERS / "pipeline_rank.py"), "biased", space, str(pp), "exchange"],
        capture_output=True, text=True, env={**os.environ, "PADDLE_TRAINERS_NUM": str(pp)},
    )  # fmt: skip
    assert run.returncode == 1
    assert "combine_op's operands has different chunk_id" in run.stderr


def events_awaited_by_a_sum() -> list[str]:
    """What the sum of two received values waits for."""
    paddle.enable_static()
    try:
        program = paddle.static.Program()
        with paddle.static.program_guard(program):
            received = {"first": paddle.full([1], 1.0), "second": paddle.full([1], 2.0)}
            waiter = paddle.add_n(list(received.values())).get_defining_op()
        for name, value in reversed(received.items()):
            Pipeline1F1BPass()._add_dependency(value.get_defining_op(), waiter, name)
        return list(waiter.attrs()["events_to_wait"])
    finally:
        paddle.disable_static()


def test_an_op_waits_for_one_received_value_only_and_for_all_of_them_with_the_patch() -> None:
    assert events_awaited_by_a_sum() == ["first"]
    with patches.receives_awaited():
        assert events_awaited_by_a_sum() == ["second", "first"]
    assert events_awaited_by_a_sum() == ["first"]


def test_the_recompute_pass_looks_for_seeds_under_a_name_that_they_do_not_have_in_pir() -> None:
    assert 'seed_op.name() != "seed"' in inspect.getsource(auto_parallel_recompute_pir)
    assert _new_seed_op_name() == "pd_op.seed"


def _new_seed_op_name() -> str:
    mesh = dist.ProcessMesh([0], dim_names=["mp"])
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            return str(seeds.new_seed_op(mesh).name())
    finally:
        paddle.disable_static()


def test_the_rule_that_places_dropout_refuses_a_seed() -> None:
    mesh = dist.ProcessMesh([0], dim_names=["mp"])
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            x = paddle.static.data("x", [4, 8], "float32")
            set_placement(x, mesh, Placement.replicated(2))
            seed = seeds.new_seed_op(mesh).result(0)
            with pytest.raises(ValueError, match="seed_tensor should be None"):
                paddle._C_ops.dropout(x, seed, 0.5, False, "upscale_in_train", 0, False)
    finally:
        paddle.disable_static()


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


def test_paddle_keeps_the_averages_of_a_single_rank() -> None:
    from paddle.distributed.auto_parallel.static import pir_pass

    source = inspect.getsource(pir_pass.remove_unuseful_comm_op_pass)
    assert "ReduceOp.SUM" in source and "AVG" not in source
