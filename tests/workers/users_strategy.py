"""Prepares an engine, and writes what the strategy of the user held before and after, and what that of the engine holds.

python users_strategy.py OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import paddle
from paddle import nn
from paddle.distributed.fleet import auto
from paddle.static import InputSpec

import paddle_rbt_plugin  # noqa: F401  registers the tuner

paddle.set_device("cpu")
network = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
tuning = {"enable": True, "pass_name": "rule_based_tuner", "cluster": "1x1:A100-80G"}
strategy = auto.Strategy({"tuning": tuning, "amp": {"enable": True, "dtype": "bfloat16", "level": "o1"}})


def held(of: auto.Strategy) -> dict:
    parts = {"pipeline": of.pipeline, "gradient_merge": of.gradient_merge, "amp": of.amp, "recompute": of.recompute}
    return {name: repr(part.to_dict()) for name, part in parts.items()}


seen = {"before": held(strategy)}
optimizer = paddle.optimizer.SGD(0.1, parameters=network.parameters())
engine = auto.Engine(network, nn.CrossEntropyLoss(), optimizer, strategy=strategy)
engine.prepare([InputSpec([8, 16], "float32", "x")], [InputSpec([8, 1], "int64", "label")], mode="train")
Path(sys.argv[1]).write_text(json.dumps(seen | {"after": held(strategy), "engine": held(engine._strategy)}))
