"""Step time and peak memory of a completed candidate.

    step = pipeline(micro batches through stages) + max over stages (gradient synchronisation + optimizer)
    peak = max over stages (states + activations in flight + what recomputation revives + largest temporary + buffers)

``segments`` costs the parts of a stage, ``stage_cost`` puts them together, ``pipeline`` puts micro batches in order, ``update``
and ``memory`` say what a step does once and what stays in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.completion.work import Completion
from paddle_rbt_plugin.cost.candidate import Candidate, Training
from paddle_rbt_plugin.cost.constants import DEFAULT, Constants
from paddle_rbt_plugin.cost.pipeline import makespan
from paddle_rbt_plugin.cost.segments import PassCost
from paddle_rbt_plugin.cost.shared import SharedCosts
from paddle_rbt_plugin.cost.stage_cost import LayerStrategy, StageCost, StageCosting
from paddle_rbt_plugin.cost.stages import make_stages

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
    shared: SharedCosts | None = None,
) -> Estimate:
    """Predicts one training step.

    ``completion`` is of the mesh of one stage; stage ``i`` runs on the ``i``-th run of as many ranks. ``stage_layers`` says how
    many layers each of the pp * vpp model chunks has, as even as possible by default. ``memory_reserve`` is the share of a
    device's memory that must stay free. ``layers`` holds the strategy of each layer where they differ, ``shared`` what earlier
    estimates for this cluster and training found (it brings its own constants). Raises TunerError if there are fewer layers
    than chunks, and ClusterError if the cluster lacks ranks or a rate for the precision.
    """
    shared = shared or SharedCosts(cluster, training, constants)
    c, micro_batches = shared.constants, candidate.accumulate_steps
    stages = make_stages(completion, candidate.pp, candidate.vpp if candidate.pp > 1 else 1, stage_layers)
    costing = StageCosting(completion, candidate, stages, shared, layers)
    costs = [costing.cost(stage) for stage in stages]
    pipeline = makespan(
        candidate.schedule,
        tuple(s.forward_seconds(c) for s in costs),
        tuple(s.backward_seconds(c) for s in costs),
        micro_batches,
    )
    closing = max(costs, key=lambda s: s.gradient_sync + s.update)
    busiest = max(costs, key=lambda s: s.busy_seconds(c))
    step = pipeline + closing.gradient_sync + closing.update
    reports = tuple(_report(s, memory_reserve, c) for s in costs)
    largest = max(reports, key=lambda s: s.peak_memory_bytes)
    tightest = max(costs, key=lambda s: sum(s.memory.values()) / s.device.memory)
    flop = model_flop(completion, candidate, shared)
    return Estimate(
        step_time_s=step,
        peak_memory_bytes=largest.peak_memory_bytes,
        fits=all(s.fits for s in reports),
        time={
            **_pipeline_breakdown(busiest, micro_batches, pipeline, c, completion.mesh.degree("ep") > 1),
            "dp_communication": closing.gradient_sync,
            "optimizer": closing.update,
        },
        memory=largest.memory,
        stages=reports,
        reserved_bytes=tightest.device.memory * memory_reserve,
        model_flop=flop,
        tflops_per_gpu=flop / step / (len(stages) * completion.mesh.size) / 1e12,
    )


def model_flop(completion: Completion, candidate: Candidate, shared: SharedCosts) -> float:
    """FLOP of one step's matrix products on whole tensors, without recomputation."""
    samples = candidate.micro_batch * candidate.accumulate_steps * completion.mesh.degree("dp")
    return sum(shared.flop(work, completion.mesh) for work in completion.work) * samples / completion.batch


def _pipeline_breakdown(s: StageCost, micro_batches: int, pipeline: float, c: Constants, experts: bool) -> dict[str, float]:
    forward, recompute, backward = (sum(passes, PassCost()) for passes in (s.forward, s.recompute, s.backward))
    p2p = sum(s.send_ahead) + sum(s.send_back)
    passes = forward + recompute + backward
    busy = s.busy_seconds(c)
    return {
        "forward": micro_batches * forward.compute,
        "backward": micro_batches * backward.compute,
        "recompute": micro_batches * recompute.compute,
        "mp_communication": micro_batches * passes.along_mp,
        "ep_communication" if experts else "batch_communication": micro_batches * passes.along_dp,
        "regrouping": micro_batches * passes.regrouping,
        "host": micro_batches * (busy - p2p - passes.compute - passes.communication),
        "p2p": micro_batches * p2p,
        "bubble": pipeline - micro_batches * busy,
    }


def _report(s: StageCost, memory_reserve: float, c: Constants) -> StageEstimate:
    return StageEstimate(
        layers=s.stage.layers,
        device=s.device.name,
        parameters=s.parameters,
        forward_s=sum(s.forward_seconds(c)),
        backward_s=sum(s.backward_seconds(c)),
        memory=s.memory,
        memory_limit_bytes=s.device.memory * (1.0 - memory_reserve),
    )
