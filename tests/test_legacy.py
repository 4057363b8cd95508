"""The legacy IR in a default run: its tests in a process whose flag says so before Paddle is imported, and what a program of
each IR has in common."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import paddle
import pytest
from paddle.distributed.passes.pass_base import PassContext, new_pass
from small import traced_gpt

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.models import GPTConfig

FLAG = "FLAGS_enable_pir_api"
FOLDER = Path(__file__).parent / "legacy"

in_pir = pytest.mark.skipif(not paddle.get_flags(FLAG)[FLAG], reason="this process runs the legacy IR itself")


@in_pir
@pytest.mark.slow
def test_the_legacy_ir_passes_its_tests_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "pytest", "-q", str(FOLDER)]
    done = subprocess.run(command, env=os.environ | {FLAG: "0"}, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@in_pir
def test_a_pir_program_is_tuned_where_paddles_own_tuner_does_nothing() -> None:
    traced = traced_gpt(GPTConfig(layers=2, hidden=32, ffn=64, heads=8, vocab=128, seq=16), 8)
    context = PassContext()
    attrs = {"cluster": "1x2:V100-32G", "search_space": {"mp": 2}}
    new_pass("rule_based_tuner", attrs).apply([traced.program], [paddle.static.Program()], context)
    plan = context.get_attr("plan")
    placed = {}
    for op in traced.program.global_block().ops:
        if op.name() == "builtin.parameter":
            placed[op.attrs()["parameter_name"]] = tuple(op.result(0).dist_attr().dims_mapping)
    assert placed == {name: t.dims_mapping for name, t in plan.tensors.items() if t.kind == "param"}
    assert any(0 in dims_mapping for dims_mapping in placed.values())


@in_pir
def test_an_engine_that_asks_for_paddles_own_tuner_in_pir_is_told_that_nothing_happens() -> None:
    from paddle.distributed.fleet import auto

    strategy = auto.Strategy()
    strategy.auto_mode = "full_rule_based"
    network = paddle.nn.Linear(16, 1)
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=network.parameters())
    engine = auto.Engine(network, paddle.nn.MSELoss(), optimizer, strategy=strategy)
    spec = paddle.static.InputSpec
    # Paddle goes on with a program that nothing has placed, and cannot.
    with pytest.warns(rbt.TunerWarning, match="rule_based_tuner"), contextlib.suppress(AttributeError):
        engine.prepare([spec([8, 16], "float32", "x")], [spec([8, 1], "float32", "y")], mode="train")
    paddle.disable_static()
