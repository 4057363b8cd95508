"""Does training under a pattern's shardings give the loss of one process?

CPU processes train in dygraph under a plan that the pattern takes part in, and this process trains the same model alone, with
the same seed and the same batches.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.handover.shared.strategy import as_the_program_runs
from paddle_rbt_plugin.model_reference import model_parts
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.processes import Processes
from paddle_rbt_plugin.request import Request
from paddle_rbt_plugin.testing import worker
from paddle_rbt_plugin.testing.matching import AnyPattern, compiled_pattern, graph_of, match_pattern
from paddle_rbt_plugin.tuner import tune_graph

TOLERANCE = 1e-5
"""Float32 keeps seven digits of a loss of a few units; sums in another order cost the last of them."""

Build = Callable[[], tuple[Any, ...]]
"""Returns ``(layer, input_spec)`` or ``(layer, input_spec, loss, labels_spec)``, as a MODEL function of ``paddle-rbt plan``."""
Batches = Callable[[int], Sequence[Any]]
"""The arrays of one step, the inputs first and then the labels."""


@dataclass(frozen=True)
class LossComparison:
    """Loss of every step, alone and by several processes."""

    plan: Plan
    serial: tuple[float, ...]
    distributed: tuple[float, ...]

    @property
    def largest_difference(self) -> float:
        """Of the losses of any step."""
        return max(abs(a - b) for a, b in zip(self.serial, self.distributed, strict=True))

    def __str__(self) -> str:
        degrees = " x ".join(f"{axis} {n}" for axis, n in self.plan.degrees.items())
        rows = zip(self.serial, self.distributed, strict=True)
        return "\n".join([f"losses under {degrees}", *(f"  step {i}: {a:.7g} alone, {b:.7g}" for i, (a, b) in enumerate(rows))])


def assert_same_loss(
    build: Build, pattern: AnyPattern | None = None, *, tolerance: float = TOLERANCE, **how: Any
) -> LossComparison:
    """Asserts that training under the plan gives the loss of one process at every step; ``how`` as in ``compare_losses``.

    The model must be free of randomness after its parameters are made: dropout draws other numbers in every process."""
    found = compare_losses(build, pattern, **how)
    assert found.largest_difference <= tolerance, f"they differ by {found.largest_difference:.1e}\n{found}"
    return found


def compare_losses(
    build: Build,
    pattern: AnyPattern | None = None,
    *,
    processes: int = 2,
    search_space: Mapping[str, Any] | None = None,
    steps: int = 3,
    batches: Batches | None = None,
    timeout: float = 300,
) -> LossComparison:
    """Trains a model alone and by ``processes`` CPU processes, for ``steps`` of AdamW.

    ``build`` makes the model, and ``batches`` what it is fed (random numbers by default; zeros and ones for integers); both
    are functions at the top of a module, since the processes call them too; a script calls this under
    ``if __name__ == "__main__"``, since they import it. The plan is made of the installed patterns and
    ``pattern``, with ``mp`` over all processes unless ``search_space`` says otherwise. Raises AssertionError where ``pattern``
    takes no part in the plan, TunerError where there is no plan, or a process fails or takes more than ``timeout`` seconds."""
    worker.name_of(build)
    if batches is not None:
        worker.name_of(batches)
    task = {"build": _reference(build), "batches": _reference(batches), "steps": steps, "path": sys.path}
    with Processes("the training", processes, steps, "steps", timeout) as job:
        plan = _plan(build, pattern, f"1x{processes}:CPU", search_space or {"mp": processes})
        plan.save(job.directory / "plan.json")
        (job.directory / "task.json").write_text(json.dumps(task))
        job.start(worker.__file__)
        serial = tuple(_alone(build, batches, steps))
        while not job.ended:
            job.check()
            time.sleep(0.1)
        return LossComparison(plan, serial, job.lines)


def _plan(build: Build, pattern: AnyPattern | None, cluster: str, search_space: Mapping[str, Any]) -> Plan:
    graph = graph_of(*model_parts(worker.name_of(build), build()))
    settings = Settings(cluster=cluster, search_space=search_space)
    added = [] if pattern is None else [compiled_pattern(pattern, load_plugins())]
    plan = tune_graph(graph, Request(settings, constraints=tuple(as_the_program_runs()), patterns=tuple(added)))
    for name in (p.name for p in added if p.name not in plan.patterns):
        raise AssertionError(f"{name} takes no part in the plan, so nothing would be tested\n{match_pattern(added[0], graph)}")
    return plan


def _alone(build: Build, batches: Batches | None, steps: int) -> list[float]:
    was_dynamic = paddle.in_dynamic_mode()
    paddle.disable_static()
    try:
        return list(worker.train(build, batches, steps, None))
    finally:
        if not was_dynamic:
            paddle.enable_static()


def _reference(function: Callable[..., Any] | None) -> dict[str, str] | None:
    if function is None:
        return None
    file = str(sys.modules[function.__module__].__file__)
    return {"module": function.__module__, "file": file, "name": function.__qualname__}
