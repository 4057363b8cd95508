"""Accumulation over micro batches trains as one batch of them does: gradients are averaged before the optimizer reads them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import paddle
import pytest
from launching import launch
from paddle import nn
from paddle.distributed.fleet import auto

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


@pytest.mark.slow
def test_micro_batches_of_several_ranks_train_as_the_batch_that_they_make(tmp_path: Path) -> None:
    check(launch("accumulation.py", 2, tmp_path / "result.json", json.dumps(PARALLEL), timeout=900), PARALLEL)


def test_an_optimizer_with_groups_of_parameters_is_refused() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [{"params": first.parameters()}, {"params": second.parameters(), "learning_rate": 0.1}]
    optimizer = auto.Engine(nn.Sequential(first, second), optimizer=paddle.optimizer.AdamW(parameters=groups))._optimizer
    with pytest.raises(TunerError, match="groups of parameters"), parameter_attributes.given(optimizer, first):
        pass


def operation(name: str, role: int, *operands: object) -> SimpleNamespace:
    values = [
        SimpleNamespace(initialized=lambda: True, get_defining_op=lambda made_by=made_by: made_by) for made_by in operands
    ]
    return SimpleNamespace(name=lambda: name, op_role=role, operands_source=lambda: values)


def test_a_gradient_that_is_not_accumulated_is_an_error() -> None:
    gradient = operation("pd_op.add_grad", 1)
    update = operation("pd_op.sgd_", 2, gradient)
    with pytest.raises(HandoverError, match=r"sgd_ reads the result of pd_op.add_grad of the last micro batch"):
        gradient_merge._check_accumulated(SimpleNamespace(ops=[gradient, update]))
    summed = operation("pd_op.scale_", 2, None)
    gradient_merge._check_accumulated(SimpleNamespace(ops=[gradient, summed, operation("pd_op.sgd_", 2, summed)]))
