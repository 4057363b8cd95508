"""Memory of one device of a stage, in bytes, at its peak.

States of training by precision and optimizer, per parameter (arXiv 1910.02054, section 3.1): the parameter and its gradient
in the training precision, a float32 master copy under fp16 and bf16, and the optimizer's float32 states. The ZeRO stage says
which of them are split over the data-parallel group: optimizer states and master copy from stage 1, gradients from
stage 2, parameters from stage 3.

Activations are what each micro batch in flight keeps, times the micro batches in flight of the schedule; at the peak one
block's recomputed values and one op's temporaries stand beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddle_rbt_plugin.cost.candidate import Candidate, Training

OPTIMIZER_STATES = {"adamw": 2, "momentum": 1, "sgd": 0}
"""Float32 states per parameter."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the training states of one device; numbers, or arrays with an entry per device."""

    parameters: Any
    master_weights: Any
    gradients: Any
    optimizer_states: Any


def state_bytes(parameters: Any, trained: Any, candidate: Candidate, training: Training, shards: int) -> StateBytes:
    """States for ``parameters`` elements on one device, of which ``trained`` get a gradient; the others (frozen) have neither
    master copy nor states. ``shards`` is the size of the data-parallel group."""
    half = training.precision != "fp32"
    stage = candidate.sharding_stage
    shards = candidate.shards(shards)

    def split(nbytes: Any, from_stage: int) -> Any:
        return nbytes / shards if stage >= from_stage else nbytes

    weights = parameters * (2 if half else 4)
    if training.mode == "eval":
        return StateBytes(weights, 0.0, 0.0, 0.0)
    return StateBytes(
        parameters=split(weights, 3),
        master_weights=split(4.0 * trained, 1) if half else 0.0,
        gradients=split(trained * gradient_itemsize(training), 2),
        optimizer_states=split(4.0 * trained * OPTIMIZER_STATES[training.optimizer], 1),
    )


def gradient_itemsize(training: Training) -> int:
    """Bytes of a gradient's element: the training precision's, or float32 where gradients are accumulated in it."""
    return 2 if training.precision != "fp32" and not training.float32_gradients else 4
