"""A device profile: what was fitted, as a cluster description that ``--cluster FILE`` takes as it is."""

from __future__ import annotations

import os
from typing import Any

import paddle
import yaml

from paddle_rbt_plugin.calibrate.fit import DeviceFit, LinkFit
from paddle_rbt_plugin.cluster import CatalogueEntry, find_device, recognise
from paddle_rbt_plugin.cost import DEFAULT

_HEADER = """\
# Device profile by paddle-rbt calibrate: {count} x {device}, measured while all of them did the same, Paddle {paddle}.
# The rates and bandwidths are those that software reaches; typical errors of the fit: {errors}.
# {not_measured}
"""


def device_profile(fit: DeviceFit, processes: int, gpus: bool) -> dict[str, Any]:
    """The description of one machine with as many devices as there were processes."""
    name, entry, memory = _gpu() if gpus else _cpu(processes)
    usual = (entry or find_device("CPU")).group(1, processes).to_dict()
    link = fit.link or LinkFit(DEFAULT.collective_launch_s, **_usual_link(usual), passes=DEFAULT.collective_passes)
    return {
        "machines": 1,
        "devices_per_machine": processes,
        "device": name,
        "tflops": {p: _short(rate / 1e12) for p, rate in fit.flops.items()},
        "memory": memory,
        "memory_bandwidth": _short(fit.bandwidth),
        "intra_link": {"bandwidth": _short(link.bandwidth), "latency": _short(link.step_s)},
        "nic": usual["nic"],
        "software": {
            "matmul_peak": 1.0,
            "matmul_fill_flop": _short(fit.fill_flop),
            "matmul_tile": fit.tile,
            # As a share of what products reach, like the others.
            "fused_attention_peak": _short(DEFAULT.fused_attention_peak / DEFAULT.matmul_peak),
            "memory_peak": _short(fit.memory_share),
            "update_peak": 1.0,
            # A CPU computes while it launches, so that its launches are gaps between kernels and nothing waits for them.
            "kernel_gap_s": _short(fit.kernel_gap_s if gpus else fit.program_launch_s),
            "host_launch_s": _short(fit.program_launch_s) if gpus else 0.0,
            "collective_passes": _short(link.passes),
            "collective_launch_s": _short(link.launch_s),
        },
    }


def profile_text(profile: dict[str, Any], fit: DeviceFit) -> str:
    """The profile as YAML, with what it says of itself."""
    links = "nic" if fit.link else "intra_link and nic"
    header = _HEADER.format(
        count=profile["devices_per_machine"],
        device=profile["device"],
        paddle=paddle.__version__,
        errors=", ".join(f"{kind} {error:.0%}" for kind, error in fit.errors.items()),
        not_measured=f"Not measured: {links}, which are those of the usual machine.",
    )
    return header + yaml.safe_dump(profile, sort_keys=False, default_flow_style=None)


def _cpu(processes: int) -> tuple[str, CatalogueEntry, int]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return "CPU", find_device("CPU"), total // processes


def _gpu() -> tuple[str, CatalogueEntry | None, int]:
    """Name, entry and memory of the first CUDA device; a device that the catalogue lacks keeps the name CUDA gives it."""
    properties = paddle.device.cuda.get_device_properties()
    entry = recognise(properties.name)
    return (entry.machine.device.name if entry else properties.name.replace(" ", "-")), entry, properties.total_memory


def _usual_link(usual: dict[str, Any]) -> dict[str, float]:
    return {"step_s": usual["intra_link"]["latency"], "bandwidth": usual["intra_link"]["bandwidth"]}


def _short(value: float) -> float:
    """Four digits, more than a measurement has."""
    return float(f"{value:.4g}")
