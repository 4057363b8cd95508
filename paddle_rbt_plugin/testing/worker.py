"""Trains a model for ``testing.training``: alone in the process that asks, and as a script in every process of the job."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.model_reference import model_parts
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.processes import work

LEARNING_RATE = 1e-3
SEED = 2024


def train(
    build: Callable[[], Any], batches: Callable[[int], Sequence[Any]] | None, steps: int, plan: Plan | None
) -> Iterator[float]:
    """Loss of every AdamW step, in dygraph: under a plan in this process of the job, or without one alone."""
    paddle.seed(SEED)
    layer, specs, loss, labels = model_parts(name_of(build), build())
    if plan is not None:
        plan.shard_layer(layer)
    optimizer = paddle.optimizer.AdamW(LEARNING_RATE, parameters=layer.parameters())
    make = batches or (lambda step: random_batch([*specs, *labels], step))
    loader: Iterable[Any] = ([paddle.to_tensor(array) for array in make(step)] for step in range(steps))
    for batch in loader if plan is None else plan.shard_dataloader(loader):
        output = layer(*batch[: len(specs)])
        value = output if loss is None else loss(output, *batch[len(specs) :])
        value.backward()
        optimizer.step()
        optimizer.clear_grad()
        whole = dist.unshard_dtensor(value) if value.is_dist() else value  # of shape [1] where ranks averaged it
        yield float(whole.item())


def random_batch(specs: Sequence[Any], step: int) -> list[np.ndarray]:
    """Arrays of the given specs: normal numbers, and zeros and ones where a spec is of integers or truth values, which are
    legal tokens of any vocabulary."""
    random = np.random.default_rng(SEED + step)
    arrays = []
    for spec in specs:
        dtype = str(spec.dtype).rsplit(".", 1)[-1].lower()
        shape = tuple(spec.shape)
        if dtype.startswith(("int", "uint", "bool")):
            arrays.append(random.integers(0, 2, shape).astype(dtype))
        else:
            arrays.append(random.standard_normal(shape).astype(dtype))
    return arrays


def name_of(function: Callable[..., Any]) -> str:
    """How the processes find a function. Raises TunerError for one that they cannot."""
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", ""))
    if "<" in name or not name or getattr(module, "__file__", None) is None:
        raise TunerError(f"{function!r} must be a function at the top of a module, for other processes call it too")
    return name


def losses(directory: str) -> Iterator[float]:
    """What one process of the job tells: its losses under ``plan.json`` of the directory, as ``task.json`` says."""
    task = json.loads(Path(directory, "task.json").read_text())
    sys.path += [path for path in task["path"] if path not in sys.path]
    build, batches = (_function(reference) for reference in (task["build"], task["batches"]))
    assert build is not None
    yield from train(build, batches, task["steps"], Plan.load(Path(directory, "plan.json")))


def _function(reference: dict[str, str] | None) -> Any:
    if reference is None:
        return None
    found: Any = _module(reference["module"], reference["file"])
    for part in reference["name"].split("."):
        found = getattr(found, part)
    return found


def _module(name: str, file: str) -> Any:
    """A module by its name, or by its file where the name leads elsewhere: a test module that no path finds, a script."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if name != "__main__" and spec is not None and spec.origin == file:
        return importlib.import_module(name)
    alias = "_rbt_tested_" + Path(file).stem
    spec = importlib.util.spec_from_file_location(alias, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module  # before it runs: dataclasses look their module up
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    work(sys.argv[1], losses(sys.argv[1]))
