"""One point of the search space, and how the model is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "fp16", "bf16"]
Recompute = Literal["none", "selective", "full"]
Schedule = Literal["FThenB", "1F1B", "VPP"]


@dataclass(frozen=True)
class Training:
    """What the user has decided about training, the same for every candidate."""

    global_batch: int
    precision: Precision = "fp32"
    optimizer: Literal["adamw", "momentum", "sgd"] = "adamw"
    mode: Literal["train", "eval"] = "train"
    fused_attention: bool = False
    """Attention runs as one kernel (flash attention) where the traced program, written for any device, spells it out."""
    fused_elementwise: bool = False
    """Runs of elementwise ops, and the ends of matrix products, are one kernel each (CINN; hand-written fused kernels)."""
    own_copies: bool = False
    """Pipeline stages send each other hidden states only, of which each rank of the mp group sends a part, which receivers
    gather (Megatron-LM); what they sum once per step of a weight that several of them hold is not counted. Without it they send
    what else layers read of others, too, as programs handed over to Paddle do (``handover.pir.pipeline``)."""
    float32_gradients: bool = False
    """Gradients are kept and reduced in float32 although the precision is fp16 or bf16 (``amp_master_grad``)."""
    overlap_mp: bool = False
    """The mp group reduces the gradient of a product's input while the gradient of its weight is computed (Megatron-LM's
    asynchronous all-reduce; Paddle's pass ``allreduce_matmul_grad_overlapping``)."""
    whole_regions: bool = False
    """A recomputed region is run again to its last op, as by PyTorch's checkpoint (Megatron-LM); see ``cost.recompute``."""
    overlap_gradients: bool = False
    """Gradients are reduced over the data-parallel group while backward still runs."""


@dataclass(frozen=True)
class Candidate:
    """One way to run the model. ``micro_batch`` is per data-parallel rank; a step runs ``accumulate_steps`` of them."""

    pp: int
    dp: int
    mp: int
    micro_batch: int
    accumulate_steps: int
    axes: tuple[str, ...] = ("dp", "mp")
    """Order of the axes of a stage's mesh; the last runs over neighbouring ranks, so it stays inside a machine first."""
    recompute: Recompute = "none"
    sharding_stage: int = 0
    """ZeRO stage over the data-parallel group, 0 to 3."""
    sequence_parallel: bool = False
    """Megatron's sequence parallelism in the mp group (arXiv 2205.05198)."""
    schedule: Schedule = "1F1B"
    vpp: int = 1
    """Model chunks per stage of the interleaved schedule."""
    sharding_degree: int | Literal["whole"] = "whole"
    """Ranks that ZeRO splits states over: the ``whole`` data-parallel group, or parts of it of so many neighbours, each with a
    copy of the states (hybrid sharding, arXiv 2304.11277, section 3.2.2)."""
    ep: int = 1
    """Ranks over which the experts of a mixture are divided: 1, or all of dp."""

    def shards(self, dp: int) -> int:
        """Over how many of ``dp`` replicas the states are split."""
        if not self.sharding_stage:
            return 1
        return dp if self.sharding_degree == "whole" else self.sharding_degree
