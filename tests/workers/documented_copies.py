"""Runs a script of the documentation, and compares the replicas of what it trained; every rank writes what was compared.

python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo documented_copies.py SCRIPT OUT
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import DistModel
from paddle.distributed.fleet import auto

import paddle_rbt_plugin as rbt


def compared(names: dict[str, Any]) -> list[str]:
    """The variables of a script whose replicas are equal. Raises HandoverError for one that differs."""
    engines = {name: value for name, value in names.items() if isinstance(value, (auto.Engine, DistModel))}
    for engine in engines.values():
        rbt.check_replicas(engine)
    if engines:
        return list(engines)
    (plan,) = (value for value in names.values() if isinstance(value, rbt.Plan))
    layers = {name: value for name, value in names.items() if isinstance(value, paddle.nn.Layer)}
    sharded = {name: layer for name, layer in layers.items() if any(p.is_dist() for p in layer.parameters())}
    for layer in sharded.values():
        plan.check_replicas(layer)
    return list(sharded)


if __name__ == "__main__":
    script, out = Path(sys.argv[1]), sys.argv[2]
    sys.path.insert(0, str(script.parent))
    found = compared(runpy.run_path(str(script), run_name="__main__"))
    Path(f"{out}.{dist.get_rank()}").write_text(json.dumps(found), encoding="utf-8")
