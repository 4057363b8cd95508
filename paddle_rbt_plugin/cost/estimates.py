"""Step time and peak memory of a completed candidate.

    step = pipeline(micro batches through stages) + max over stages (gradient synchronisation + optimizer)
    peak = max over stages (states + activations in flight + what recomputation revives + largest temporary + buffers)

A table has the costs of layers (``table``), ``stage_costs`` sums them up for stages, ``step_costs`` adds what a step does once
and what stays in memory (``update``, ``memory``), and ``pipeline`` puts micro batches in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.completion.work import Completion
from paddle_rbt_plugin.cost.candidate import Candidate, Training
from paddle_rbt_plugin.cost.constants import DEFAULT, Constants
from paddle_rbt_plugin.cost.costs import CandidateCosts
from paddle_rbt_plugin.cost.pipeline import makespan
from paddle_rbt_plugin.cost.segment_table import ALONG_DP, ALONG_MP, BACKWARD, COMPUTE, FORWARD, RECOMPUTE
from paddle_rbt_plugin.cost.stage_costs import LayerStrategy, StageCosts

RESOLUTION = 0.005
"""Relative difference of two predicted step times below which neither is known to be faster. Of the 144 pairs of vTrain's
measured runs (arXiv 2312.12391; one model, number of devices and batch) that are predicted to differ by less than 1 %, half are
in the right order, as by tossing a coin; of those that differ by 1 to 2 % it is 59 % of 157, by 5 to 10 % 73 % of 618. Half of
that 1 %, since candidates that are much alike share more of their errors than these runs do."""


@dataclass(frozen=True)
class StageEstimate:
    """One pipeline stage: seconds per micro batch and bytes per device."""

    layers: tuple[tuple[int, int], ...]
    """First and last layer of each of its chunks."""
    device: str
    parameters: float
    """Elements on one device, before ZeRO splits them."""
    forward_s: float
    backward_s: float
    """Recomputation included."""
    memory: Mapping[str, float]
    """Bytes by purpose, see ``Estimate.memory``."""
    memory_limit_bytes: float
    """What the device has, less the reserve."""

    @property
    def peak_memory_bytes(self) -> float:
        """On each device of the stage."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """The peak is no more than the device has, less the reserve."""
        return self.peak_memory_bytes <= self.memory_limit_bytes


@dataclass(frozen=True)
class Estimate:
    """What a step of a candidate costs."""

    step_time_s: float
    peak_memory_bytes: float
    """Of the device that needs most, the reserve not counted."""
    fits: bool
    """Every stage fits its device, less the reserve."""
    time: Mapping[str, float]
    """Seconds that add up to the step, along the busiest stage: ``forward``, ``backward``, ``recompute`` (kernels),
    ``mp_communication``, ``batch_communication`` (what the batch splits and a pass needs whole: the loss, and what ops read
    that Paddle knows no sharding of) or, where experts are divided, ``ep_communication`` (all along dp: the exchange of
    tokens above all), ``regrouping`` (between layers on meshes of other shapes, level o2), ``host`` (the device waits for
    launches), ``p2p``, ``bubble``, ``dp_communication`` (what is exposed of the synchronisation of gradients),
    ``optimizer``."""
    memory: Mapping[str, float]
    """Bytes that add up to the peak: ``parameters``, ``master_weights``, ``gradients``, ``optimizer_states``,
    ``activations``, ``recomputed``, ``temporaries``, ``communication``."""
    stages: tuple[StageEstimate, ...]
    reserved_bytes: float
    """What the reserve keeps free on the device that is fullest."""
    model_flop: float
    """FLOP of the matrix products of one step on all devices, forward and backward, recomputation not counted."""
    tflops_per_gpu: float
    """Model FLOP per second and device, in 1e12."""


def estimate(
    completion: Completion,
    candidate: Candidate,
    cluster: Cluster,
    training: Training,
    *,
    memory_reserve: float = 0.1,
    stage_layers: Sequence[int] | None = None,
    constants: Constants = DEFAULT,
    layers: Sequence[LayerStrategy] | None = None,
    costs: CandidateCosts | None = None,
) -> Estimate:
    """Predicts one training step.

    ``completion`` is of the mesh of one stage; stage ``i`` runs on the ``i``-th run of as many ranks. ``stage_layers`` says how
    many layers each of the pp * vpp model chunks has, as even as possible by default. ``memory_reserve`` is the share of a
    device's memory that must stay free. ``layers`` holds the strategy of each layer where they differ, ``costs`` what earlier
    estimates for this cluster and training found (it brings its own constants). Raises TunerError if there are fewer layers
    than chunks, and ClusterError if the cluster lacks ranks or a rate for the precision.
    """
    costs = costs or CandidateCosts(cluster, training, constants)
    found = costs.one(completion, candidate, stage_layers, layers)
    stages, micro_batches = found.pipeline.stages, candidate.accumulate_steps
    simulated = makespan(candidate.schedule, _by_stage(stages.forward), _by_stage(stages.backward), micro_batches)
    pipeline = max(simulated, float(found.pipeline.least_seconds[0]))
    closing = int(np.argmax(found.gradient_sync[0] + found.update))
    sync, update = float(found.gradient_sync[0, closing]), float(found.update[closing])
    step = pipeline + float(found.closing_seconds[0])
    memory = {purpose: np.broadcast_to(nbytes, (1, candidate.pp))[0].tolist() for purpose, nbytes in found.memory().items()}
    peaks = found.peak[0].tolist()
    limits = [m.memory * (1.0 - memory_reserve) for m in stages.machines]
    largest = peaks.index(max(peaks))
    tightest = max(range(len(peaks)), key=lambda s: peaks[s] / stages.machines[s].memory)
    flop = model_flop(completion, candidate, costs)
    return Estimate(
        step_time_s=step,
        peak_memory_bytes=peaks[largest],
        fits=all(peak <= limit for peak, limit in zip(peaks, limits, strict=True)),
        time={
            **_pipeline_breakdown(stages, micro_batches, pipeline, completion.mesh.degree("ep") > 1),
            "dp_communication": sync,
            "optimizer": update,
        },
        memory={purpose: nbytes[largest] for purpose, nbytes in memory.items()},
        stages=_reports(stages, memory, limits),
        reserved_bytes=stages.machines[tightest].memory * memory_reserve,
        model_flop=flop,
        tflops_per_gpu=flop / step / (candidate.pp * completion.mesh.size) / 1e12,
    )


def model_flop(completion: Completion, candidate: Candidate, costs: CandidateCosts) -> float:
    """FLOP of one step's matrix products on whole tensors, without recomputation."""
    samples = candidate.micro_batch * candidate.accumulate_steps * completion.mesh.degree("dp")
    return costs.table.flop(completion) * samples / completion.batch


def _by_stage(of_chunks: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """Seconds of the chunks of each stage, of the one micro batch there is."""
    return tuple(map(tuple, of_chunks[0].T.tolist()))


def _pipeline_breakdown(stages: StageCosts, micro_batches: int, pipeline: float, experts: bool) -> dict[str, float]:
    s = int(np.argmax(stages.busy[0]))
    seconds = stages.seconds[0, :, s].sum(0)
    regrouping = stages.regrouping[0, :, s].sum()
    p2p, busy = (stages.send_ahead + stages.send_back)[0, :, s].sum(), stages.busy[0, s]
    parts = {
        "forward": seconds[FORWARD, COMPUTE],
        "backward": seconds[BACKWARD, COMPUTE],
        "recompute": seconds[RECOMPUTE, COMPUTE],
        "mp_communication": seconds[:, ALONG_MP].sum(),
        "ep_communication" if experts else "batch_communication": seconds[:, ALONG_DP].sum(),
        "regrouping": regrouping,
        "host": busy - p2p - seconds.sum() - regrouping,
        "p2p": p2p,
    }
    seconds_of = {name: float(micro_batches * part) for name, part in parts.items()}
    return seconds_of | {"bubble": pipeline - micro_batches * float(busy)}


def _reports(stages: StageCosts, memory: Mapping[str, Sequence[float]], limits: Sequence[float]) -> tuple[StageEstimate, ...]:
    parameters = np.sum([part.parameters for part in stages.parts], axis=0).tolist()
    forward, backward = stages.forward[0].sum(0).tolist(), stages.backward[0].sum(0).tolist()
    return tuple(
        StageEstimate(
            layers=stages.cut.layers(s),
            device=machine.name,
            parameters=parameters[s],
            forward_s=forward[s],
            backward_s=backward[s],
            memory={purpose: nbytes[s] for purpose, nbytes in memory.items()},
            memory_limit_bytes=limits[s],
        )
        for s, machine in enumerate(stages.machines)
    )
