"""Every change to Paddle is still needed, is undone where it is a scope, and is listed."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys

import paddle
import paddle.distributed as dist
import paddle_change_demonstrations as demonstrations
import pytest
from launching import WORKERS
from paddle.jit import dy2static

import paddle_rbt_plugin
from paddle_rbt_plugin.completion.distributed_ops import set_placement
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.pir import native, patches, seeds
from paddle_rbt_plugin.handover.shared import gloo
from paddle_rbt_plugin.paddle_changes import CHANGES, INSTALLED_AT_IMPORT
from paddle_rbt_plugin.patching import PaddleChange

IN_PIR = [change for change in CHANGES if change.name not in demonstrations.IN_LEGACY]


@pytest.mark.parametrize("change", IN_PIR, ids=lambda change: change.name)
def test_paddle_still_needs_the_change(change: PaddleChange) -> None:
    if not change.is_needed():
        pytest.skip(f"the change is for Paddle {change.versions}, or for other devices")
    try:
        with change.left_out():
            getattr(demonstrations, change.name)()
    finally:
        paddle.disable_static()  # an engine leaves it on


CURED = [change for change in IN_PIR if not change.takes_arguments and change.name not in demonstrations.SEEN_ELSEWHERE]


@pytest.mark.parametrize("change", CURED, ids=lambda change: change.name)
def test_the_change_cures_what_is_demonstrated(change: PaddleChange) -> None:
    if not change.is_needed():
        pytest.skip(f"the change is for Paddle {change.versions}, or for other devices")
    try:
        with change.apply(), pytest.raises((Exception, pytest.fail.Exception)):
            getattr(demonstrations, change.name)()
    finally:
        paddle.disable_static()


def test_every_change_is_listed_with_a_reason_and_demonstrated_once() -> None:
    names = [change.name for change in CHANGES]
    assert len(set(names)) == len(names)
    assert [change.name for change in CHANGES if not (change.reason and hasattr(demonstrations, change.name))] == []
    modules = [
        importlib.import_module(found.name)
        for package in ("handover", "cost", "calibrate")
        for found in pkgutil.walk_packages(
            [f"{paddle_rbt_plugin.__path__[0]}/{package}"], prefix=f"paddle_rbt_plugin.{package}."
        )
    ]
    made = {value.name for module in modules for value in vars(module).values() if isinstance(value, PaddleChange)}
    assert made == set(names)


def test_importing_the_package_makes_no_other_changes() -> None:
    script = (
        "import paddle_rbt_plugin; from paddle_rbt_plugin.paddle_changes import CHANGES; "
        "print(*sorted(change.name for change in CHANGES if change.is_made))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == sorted(change.name for change in INSTALLED_AT_IMPORT if change.is_needed())


def test_what_stays_says_why_and_a_scope_cannot_be_installed() -> None:
    assert all(change.permanent for change in INSTALLED_AT_IMPORT)
    with pytest.raises(ValueError, match="is a scope"):
        native.native_tracing.install()


def test_a_scope_puts_back_what_it_replaces_even_after_an_error_and_nests() -> None:
    original = dy2static.Call
    with pytest.raises(ZeroDivisionError), native.native_tracing.apply(), native.native_tracing.apply():
        assert dy2static.Call is not original
        raise ZeroDivisionError
    assert dy2static.Call is original


def test_an_op_waits_for_all_received_values_with_the_change() -> None:
    with patches.receives_awaited.apply():
        assert demonstrations.events_awaited_by_a_sum() == ["second", "first"]


def test_the_distributed_strategy_takes_tuning_from_a_dict_or_an_attribute() -> None:
    strategy = dist.Strategy({"tuning": {"enable": True, "pass_name": "rule_based_tuner", "search_space": {"mp": 2}}})
    assert strategy.tuning.enable and strategy.tuning.search_space == {"mp": 2}
    other = dist.Strategy()
    assert not other.tuning.enable and other.tuning.pass_name is None


def test_a_cpu_mesh_with_two_active_axes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    mesh = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])
    with pytest.raises(TunerError, match="two active axes"):
        gloo.enable_static_training_on_cpu([mesh])


def test_a_single_process_is_left_alone() -> None:
    gloo.enable_static_training_on_cpu([dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])])
    assert not gloo.programs_communicate_through_gloo.is_made


def test_the_rule_that_places_dropout_refuses_a_seed() -> None:
    """So a seed becomes an operand after the op was built, see ``seeds``."""
    mesh = dist.ProcessMesh([0], dim_names=["mp"])
    with demonstrations.new_program():
        x = paddle.static.data("x", [4, 8], "float32")
        set_placement(x, mesh, Placement.replicated(2))
        seed = seeds.new_seed_op(mesh).result(0)
        with pytest.raises(ValueError, match="seed_tensor should be None"):
            paddle._C_ops.dropout(x, seed, 0.5, False, "upscale_in_train", 0, False)


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 4])
def test_gradients_that_are_summed_over_chunks_are_refused_without_the_change(pp: int) -> None:
    space = json.dumps({"pp": pp, "dp": 1, "mp": 1, "vpp": 2, "accumulate_steps": 2 * pp})
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(WORKERS / "pipeline_rank.py"), "biased", space, str(pp), "exchange"],
        capture_output=True, text=True, env={**os.environ, "PADDLE_TRAINERS_NUM": str(pp)},
    )  # fmt: skip
    assert run.returncode == 1
    assert "combine_op's operands has different chunk_id" in run.stderr
