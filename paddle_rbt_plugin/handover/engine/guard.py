"""The guard: before the first step, every process compares the program that it will run with the plan.

It compares the program that Paddle made for this rank from the annotated one with the prediction of completion
(``prediction``): its collectives and transfers, the local shapes of its parameters, the bytes of its gradients and the FLOP of
its matrix products. The update may communicate more than planned; there is a warning if that is more than the scalar reductions
per parameter that clipping and loss scaling add. Mixed precision inserts casts and changes the size of messages, so only shapes
are compared. The backward pass is not compared if the model itself marks regions to recompute, which the prediction does not
know.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import paddle

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.errors import HandoverError, TunerWarning
from paddle_rbt_plugin.graph import read_program
from paddle_rbt_plugin.handover.passes import forms_of_job, placements_for
from paddle_rbt_plugin.handover.pir.engine_programs import REPLICATED
from paddle_rbt_plugin.handover.pir.patches import programs_of_ranks_seen
from paddle_rbt_plugin.handover.pir.prediction import meshes_of, predictions
from paddle_rbt_plugin.handover.pir.recompute import is_marked
from paddle_rbt_plugin.handover.pir.structure import Collectives, Structure, compare, parameters_of, structure_of
from paddle_rbt_plugin.handover.shared.strategy import settings_of
from paddle_rbt_plugin.plan.plan import Plan

_NUMBER_BYTES = 8
"""Largest size in bytes of a scalar that clipping or loss scaling reduces."""


@contextmanager
def compared(engine: Any, mode: str, plan: Plan, serial: Any, zero_stage: int) -> Iterator[None]:
    """Compares the program that an engine makes for ``mode`` within the scope with the plan, once it is reduced to what this
    rank does, unless ``strategy.tuning.verify`` is False. ``serial`` is the program before it was annotated.

    Raises HandoverError that names the first difference."""
    if not settings_of(engine._strategy.tuning).verify:
        yield
        return

    def check(program: Any, gradients: Any) -> None:
        _check(engine, mode, plan, serial, zero_stage, program, gradients)

    with programs_of_ranks_seen.apply(check):
        yield


def _check(engine: Any, mode: str, plan: Plan, serial: Any, zero_stage: int, program: Any, gradients: Any) -> None:
    train, strategy = mode == "train", engine._strategy
    blocked = settings_of(strategy.tuning).blocked_plugins
    graph = read_program(serial, serial.get_output_value_by_name(engine._loss_names[0]) if train else None, needs_loss=train)
    if any(t.name not in plan.tensors for t in graph.params):  # a loaded plan, from a process with other names
        leaves = {name: t.placement for name, t in plan.leaves(graph).items()}
    else:
        leaves = placements_for(graph, plan, getattr(engine, REPLICATED, False))
    rank, meshes = paddle.distributed.get_rank(), meshes_of(plan)
    stage = next((i for i, mesh in enumerate(meshes) if rank in mesh.ranks), 0)
    recomputed = strategy.recompute.enable and not is_marked(serial)
    planned = predictions(plan, graph, leaves, train, forms_of_job(plan), zero_stage, recomputed, blocked)[stage]
    if not paddle.is_compiled_with_cuda():
        planned = replace(planned, collectives=_on_cpus(planned.collectives, meshes[stage]))
    parameters = parameters_of(program, {t.name for t in graph.params})
    found = structure_of(program, gradients, parameters, meshes[stage])
    added = _added_to_update(planned, found)
    if added:  # the gradients that Paddle reports are then those that the update gathered
        planned = replace(planned, gradient_bytes=found.gradient_bytes)
        warnings.warn(
            f"the update of this optimizer communicates more than the plan counts: {', '.join(added)}; clipping by the norm of "
            "each gradient and optimizers such as Lamb need whole gradients",
            TunerWarning,
            stacklevel=2,
        )
    differences = compare(*_comparable(planned, found, strategy.amp.enable, strategy.recompute.enable and is_marked(serial)))
    if differences:
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        raise HandoverError(
            f"rank {rank} would not execute the plan: {differences[0]}{more}. Nothing has been trained. Plan with another "
            "search_space, or set strategy.tuning.verify to False to train anyway"
        )


def _on_cpus(collectives: Collectives, mesh: ProcessMesh) -> Collectives:
    """The collectives as gloo runs them; it lacks two kinds (``shared.gloo``)."""
    found: Counter[tuple[str, str, str, int]] = Counter()
    for (phase, kind, axis, nbytes), count in collectives.items():
        if kind == "reduce_scatter":
            kind = "all_reduce"
        elif kind == "all_to_all":  # the message of an all-gather is its result
            kind, nbytes = "all_gather", nbytes * mesh.degree(axis)
        found[(phase, kind, axis, nbytes)] += count
    return found


def _comparable(planned: Structure, found: Structure, mixed_precision: bool, own_regions: bool) -> tuple[Structure, Structure]:
    """Both without what is not compared."""
    if mixed_precision:
        return Structure({}, 0, local_shapes=planned.local_shapes), Structure({}, 0, local_shapes=found.local_shapes)
    planned = replace(planned, optimizer_bytes=0)
    kept = {
        key: min(n, planned.collectives.get(key, 0)) if key[0] == "optimizer" else n for key, n in found.collectives.items()
    }
    found = replace(found, collectives=kept)
    return (_without_backward(planned), _without_backward(found)) if own_regions else (planned, found)


def _added_to_update(planned: Structure, found: Structure) -> list[str]:
    """What the update communicates beyond the plan and a scalar per parameter."""
    most = _NUMBER_BYTES * max(len(planned.local_shapes), 1)
    return [
        f"{kind} along {axis} of {nbytes} bytes"
        for (phase, kind, axis, nbytes), count in found.collectives.items()
        if phase == "optimizer" and nbytes > most and count > planned.collectives.get((phase, kind, axis, nbytes), 0)
    ]


def _without_backward(structure: Structure) -> Structure:
    collectives = {key: count for key, count in structure.collectives.items() if key[0] != "backward"}
    return replace(structure, collectives=collectives, matmul_flop=0.0)
