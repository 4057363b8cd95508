"""Accumulation over micro batches trains as one batch of them does: gradients are averaged before the optimizer reads them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import paddle
import pytest
from launching import launch
from paddle import nn
from paddle.distributed.fleet import auto
from paddle.distributed.fleet.meta_optimizers.common import OpRole

from paddle_rbt_plugin.errors import HandoverError, TunerError
from paddle_rbt_plugin.handover.pir import gradient_merge, parameter_attributes

SGD = {"optimizer": "SGD", "arguments": {"learning_rate": 0.5}, "micro_batches": 2}
MOMENTUM = {"optimizer": "Momentum", "arguments": {"learning_rate": 0.2, "use_nesterov": True}, "micro_batches": 4}
ADAM_W = {"optimizer": "AdamW", "arguments": {"learning_rate": 0.01}, "micro_batches": 2}
GLOBAL_NORM = {"clip": ["ClipGradByGlobalNorm", 0.1]}
CASES = {
    "SGD": SGD,
    "SGD, global norm": SGD | GLOBAL_NORM,
    "SGD, norm": SGD | {"clip": ["ClipGradByNorm", 0.05]},
    "SGD, value": SGD | {"clip": ["ClipGradByValue", 0.01]},
    "SGD, weight decay": SGD | {"arguments": {"learning_rate": 0.5, "weight_decay": 0.1}},
    "SGD, sums": SGD | GLOBAL_NORM | {"avg": False},
    "Momentum": MOMENTUM,
    "Momentum, weight decay, global norm": MOMENTUM | GLOBAL_NORM | {"arguments": {"learning_rate": 0.2, "weight_decay": 0.1}},
    "Momentum, sums": MOMENTUM | {"avg": False},
    "AdamW, global norm": ADAM_W | GLOBAL_NORM,
}
CASES |= {
    f"{name}, parameter with {attribute}": CASES[name] | {"attribute": {attribute: value}}
    for name in ("SGD, value", "Momentum, weight decay, global norm", "AdamW, global norm")
    for attribute, value in (("learning_rate", 0.1), ("L1", 0.5), ("need_clip", False))
}
PARALLEL = {f"{name}, dp2": case | {"space": {"dp": 2, "sharding_stage": 0}} for name, case in CASES.items()}
PARALLEL |= {
    f"{name}, ZeRO {stage}": CASES[name] | {"space": {"dp": 2, "sharding_stage": stage}}
    for name in ("SGD, global norm", "AdamW, global norm")
    for stage in (1, 2)
}
PARALLEL |= {
    f"{name}, mp2": CASES[name] | {"space": {"mp": 2}}
    for name in ("SGD, global norm", "SGD, norm", "Momentum", "AdamW, global norm")
}


def check(found: dict[str, dict], cases: dict[str, dict]) -> None:
    assert found.keys() == cases.keys()
    for name, case in found.items():
        assert case["weights"] < 1e-4, (name, case)
        # Once per accumulated gradient; weight decay and clipping scale other tensors, not in place.
        assert case["scales"] == (case["parameters"] if cases[name].get("avg", True) else 0), (name, case)


def test_micro_batches_train_as_the_batch_that_they_make(tmp_path: Path) -> None:
    check(launch("accumulation.py", 1, tmp_path / "result.json", json.dumps(CASES)), CASES)


def test_the_pass_of_paddle_still_divides_what_the_update_reads(tmp_path: Path) -> None:
    cases = {name: CASES[name] | {"patched": False} for name in ("SGD", "SGD, global norm", "Momentum")}
    found = launch("accumulation.py", 1, tmp_path / "result.json", json.dumps(cases))
    assert found["SGD"]["weights"] < 1e-4  # nothing lies between the sum and the update
    assert found["SGD, global norm"]["weights"] > 1e-2  # the sum is clipped, then divided
    assert found["Momentum"]["scales"] > 2 * found["Momentum"]["parameters"]


@pytest.mark.slow
def test_micro_batches_of_several_ranks_train_as_the_batch_that_they_make(tmp_path: Path) -> None:
    check(launch("accumulation.py", 2, tmp_path / "result.json", json.dumps(PARALLEL), timeout=900), PARALLEL)


def test_an_optimizer_with_groups_of_parameters_is_refused() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [{"params": first.parameters()}, {"params": second.parameters(), "learning_rate": 0.1}]
    optimizer = auto.Engine(nn.Sequential(first, second), optimizer=paddle.optimizer.AdamW(parameters=groups))._optimizer
    with pytest.raises(TunerError, match="parameter groups"), parameter_attributes.given(optimizer, first):
        pass


@pytest.mark.parametrize("is_summed", [False, True])
def test_a_gradient_that_is_not_accumulated_is_an_error(is_summed: bool) -> None:
    paddle.enable_static()
    try:
        program = paddle.static.Program()
        with paddle.static.program_guard(program):
            gradient = paddle.nn.functional.relu(paddle.static.data("x", [4], "float32"))
            gradient.get_defining_op().op_role = int(OpRole.Backward)
            total = paddle.static.data("sum", [4], "float32")
            paddle.tanh(total if is_summed else gradient).get_defining_op().op_role = int(OpRole.Optimize)
        refused = pytest.raises(HandoverError, match=r"tanh reads the result of pd_op.relu for the last micro batch")
        with contextlib.nullcontext() if is_summed else refused:
            gradient_merge.average(program, [(gradient, total)], 2)
    finally:
        paddle.disable_static()
