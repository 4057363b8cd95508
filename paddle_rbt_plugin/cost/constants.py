"""Constants of the cost model: few, physical, each with where it comes from.

They describe hardware and runtime, never a model or a strategy. Figures of one device (peak FLOP/s, memory, bandwidths, link
latencies) are in the device catalogue; what is here holds for all devices and says how much of those figures software reaches.

"Fitted to published runs" means: first by minimising the error of the step times of ``benchmarks/published`` and of measured
Megatron-DeepSpeed strategies for GPT of 0.3 to 39 B parameters on 2 to 512 A100s (vTrain), then chosen by hand from about a
hundred settings near that minimum for the rank correlation and the regret on the same runs. So agreement with these runs is
agreement with training data. The least error alone gives matmul_peak 0.74, memory_peak 0.64 and host_launch_s 71e-6; step
times and rank correlation hardly change between the two, but the mean regret on one machine goes from 4.8 % to between 4.9 and
8 % when a single constant moves by 5 %.

How far that carries: with each data set left out in turn and matmul_peak, memory_peak, host_launch_s, collective_passes and
inter_bandwidth fitted to the others (least absolute error of logarithms, each data set weighing alike), the error of the one
left out is 3.1 % (SC'21), 6.0 % (sequence parallelism), 3.7 % (PaddleNLP), 10.6 % (3.6 B), 7.8 % (39.1 B, rank correlation
0.71) and 9.4 % (one machine, rank correlation 0.90, mean regret 4.9 %); the constants below have 3.7, 4.4, 3.9, 10.1, 7.6 and
9.4 %. Of the data sets the 3.6 B runs alone tell inter_bandwidth. What is left on one machine is mostly where host and device
need about equally long: such runs take up to a quarter longer than the longer of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paddle_rbt_plugin.cluster import MachineGroup


@dataclass(frozen=True)
class Constants:
    """How much of the hardware's figures software reaches, and what each launch costs."""

    matmul_peak: float = 0.695
    """Share of the peak FLOP/s that a very large matrix product reaches inside a training step, at the clock that the power
    limit allows and with its neighbours in the caches. Fitted to published runs; a large product run alone on an A100 reaches
    0.8 to 0.85."""
    matmul_fill_flop: float = 3e9
    """FLOP that a device could have done while it fills and empties for one product: at an A100's peak 10 us. Fitted to
    published runs."""
    matmul_tile: int = 64
    """Edge of the smallest output tile of a product; a smaller edge is padded to it. Assumed; 32 to 128 fit the published
    runs alike."""
    fused_attention_peak: float = 0.6
    """Share of the peak FLOP/s that fused attention reaches (arXiv 2307.08691, figures 4 to 6: 0.5 to 0.73 on an A100)."""
    memory_peak: float = 0.78
    """Share of the memory bandwidth that kernels bound by it reach: norms, softmax, dropout, elementwise ops.
    Fitted to published runs."""
    update_peak: float = 0.78
    """Share of the memory bandwidth that clipping and the optimizer reach, which stream whole states. The published runs do not
    tell it from ``memory_peak``; on a CPU it is three times as large."""
    kernel_gap_s: float = 2e-6
    """Seconds from one kernel of a stream to the next on the device with launches queued. Assumed;
    0 to 4e-6 fit the published runs alike."""
    host_launch_s: float = 73e-6
    """Seconds that the host needs to issue one kernel of an eager framework, autograd and what lies between fused kernels
    included; the device waits where its own work is shorter. Fitted to published runs, by those too small for their devices."""
    collective_passes: float = 3.2
    """Times that an all-reduce reads or writes its message in device memory beside sending it: NCCL's copies between
    buffers. Within 16 % of NCCL all-reduces of 1 MiB to 1 GiB on 2, 4 and 8 A100s (3.6 fits large messages best). V100s are
    off by about 20 %, two of them by a factor of four, since fewer of their links lead to one neighbour."""
    collective_launch_s: float = 30e-6
    """Seconds to start a collective. Fitted as ``collective_passes``."""
    inter_bandwidth: float = 0.93
    """Share of the network cards' bandwidth that collectives between machines reach. Fitted to published runs with tensor
    parallelism over two machines."""
    bucket_bytes: float = 256e6
    """Size of the buffers that gradients are sent in (PyTorch and Megatron-LM: 25 MB to 1 GB)."""


DEFAULT = Constants()
"""The constants of the shipped model."""

_MORE_IS_FASTER = {"matmul_peak", "fused_attention_peak", "memory_peak", "update_peak", "inter_bandwidth"}


def constants_on(groups: Sequence[MachineGroup], constants: Constants = DEFAULT) -> Constants:
    """The constants with what the devices of groups of machines say of their software in place of them; where the groups
    differ, the slowest of all."""
    stated = [dict(group.device.software) for group in groups]
    names = {name for software in stated for name in software}
    return replace(
        constants,
        **{
            name: (min if name in _MORE_IS_FASTER else max)(s.get(name, getattr(constants, name)) for s in stated)
            for name in names
        },
    )
