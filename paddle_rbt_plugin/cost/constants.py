"""Constants of the cost model: few, physical, each with where it comes from.

They describe hardware and runtime, never a model or a strategy. Numbers of one device (peak FLOP/s, memory, bandwidths)
are in the device catalogue; what is here holds for all devices and says how much of those numbers software reaches.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """How much of the hardware's figures software reaches, and what each launch costs."""

    matmul_peak: float = 0.85
    """Share of the peak FLOP/s that a very large matrix product reaches."""
    matmul_tail_tiles: float = 54.0
    """Output tiles lost to the last, half empty wave: half of an A100's 108 multiprocessors."""
    matmul_tile: int = 128
    """Edge of an output tile; a smaller edge is padded to it (cuBLAS' and CUTLASS' usual large tile)."""
    matmul_half_k: float = 64.0
    """Inner dimension at which filling and draining a tile takes as long as its products."""
    fused_attention_peak: float = 0.6
    """Share of the peak FLOP/s of a fused attention kernel (arXiv 2307.08691, figures 4 to 6, A100, head dimension 128)."""
    memory_peak: float = 0.8
    """Share of the memory bandwidth that streaming kernels reach."""
    kernel_gap_s: float = 2e-6
    """Seconds between two kernels of one stream."""
    host_launch_s: float = 30e-6
    """Seconds the host needs to issue one op of an eager framework, autograd included; the device waits where its own
    work is shorter."""
    intra_bandwidth: float = 0.78
    """Share of the link bandwidth inside a machine that a collective of large messages reaches."""
    inter_bandwidth: float = 0.8
    """Share of the network cards' bandwidth that a collective of large messages reaches."""
    collective_launch_s: float = 30e-6
    """Seconds to start a collective."""
    intra_hop_s: float = 4e-6
    """Seconds of one step of a ring inside a machine."""
    inter_hop_s: float = 12e-6
    """Seconds of one step of a ring between machines."""
    bucket_bytes: float = 256e6
    """Size of the buffers that gradients are sent in."""


DEFAULT = Constants()
"""The constants of the shipped model."""
