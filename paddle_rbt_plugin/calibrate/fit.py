"""From measured times to the few figures of a device that explain them.

Each figure is a coefficient of a formula of the cost model, so what is fitted is what the model computes with:

    product      T = FLOP of whole tiles / R + fill / R          R: FLOP/s reached, by precision (``cost.compute``)
    traffic      T = bytes / B                                   B: bytes/s that the optimizer reaches, which only streams
    traffic      T = bytes / (B * share)                         and the ops of a layer together, which also compute
    collective   T = launch + steps * a + bytes moved / b + bytes * passes / B         (``cost.communication``)

They are found by least squares of relative errors, reweighted so that the typical measurement counts and the odd one does not
(iteratively reweighted towards least absolute deviations), no coefficient below zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from paddle_rbt_plugin.errors import TunerError

TILES = (16, 32, 64, 128, 256)
"""Edges of the smallest output tile that are tried."""
STREAMING = "adamw"
"""The op that is bound by memory alone."""
_ROUNDS = 30
_SMALLEST_RESIDUAL = 0.01
"""Relative errors below this weigh alike."""

Sample = Mapping[str, Any]


@dataclass(frozen=True)
class DeviceFit:
    """What one device reaches while all do the same, in FLOP/s, bytes/s and seconds. ``link`` is None for one device alone."""

    flops: Mapping[str, float]
    """By precision, of a very large product."""
    fill_flop: float
    tile: int
    bandwidth: float
    """Of device memory, as the optimizer streams through it."""
    memory_share: float
    """What part of it the ops of a layer reach together."""
    program_launch_s: float
    eager_launch_s: float
    kernel_gap_s: float
    link: LinkFit | None
    errors: Mapping[str, float]
    """Median of |fitted / measured - 1| by kind of measurement."""


@dataclass(frozen=True)
class LinkFit:
    """The terms of a collective: seconds to start one, seconds per step, bytes/s, and passes through device memory."""

    launch_s: float
    step_s: float
    bandwidth: float
    passes: float


def fit(samples: Sequence[Sample]) -> DeviceFit:
    """Fits what ``calibrate.measure`` tells. Raises TunerError where a kind of measurement is missing altogether."""
    kinds: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if "seconds" in sample:
            kinds[sample["kind"]].append(sample)
    for kind in ("product", "traffic", "launch"):
        if not kinds[kind]:
            raise TunerError(f"nothing of the kind {kind!r} could be measured: {_reason(samples, kind)}")
    launches = {s["way"]: s["seconds"] for s in kinds["launch"]}
    flops, fill_flop, tile, product_error = fit_products(kinds["product"], launches["eager"])
    bandwidth, share, traffic_error = fit_traffic(kinds["traffic"])
    errors = {"product": product_error, "traffic": traffic_error}
    link = None
    if kinds["collective"]:
        link, errors["collective"] = fit_collectives(kinds["collective"], bandwidth)
    return DeviceFit(
        flops=flops,
        fill_flop=fill_flop,
        tile=tile,
        bandwidth=bandwidth,
        memory_share=share,
        program_launch_s=launches["program"],
        eager_launch_s=launches["eager"],
        kernel_gap_s=launches["queued"],
        link=link,
        errors=errors,
    )


def fit_products(samples: Sequence[Sample], launch: float) -> tuple[dict[str, float], float, int, float]:
    """FLOP/s by precision, the FLOP that filling takes, the tile, and the median error. ``launch`` seconds of each time are
    the host's; products too small to hide them say little and are left out."""
    by_precision: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample["seconds"] > 3 * launch:
            by_precision[sample["precision"]].append(sample)
    if not by_precision:
        raise TunerError(
            f"every matrix product took less than three launches of {launch:.1e} s, too little to measure its rate"
        )
    fitted = {p: min((_fit_tile(s, tile) for tile in TILES), key=lambda f: f[3]) for p, s in by_precision.items()}
    # The cost model has one tile and one fill for all precisions: those of the fastest, which trains.
    fastest = max(fitted, key=lambda p: fitted[p][0])
    _, fill, tile, error = fitted[fastest]
    flops = {
        p: float(np.median([(_padded_flop(s, tile) + fill) / s["seconds"] for s in found])) for p, found in by_precision.items()
    }
    return {**flops, fastest: fitted[fastest][0]}, fill, tile, error


def _fit_tile(samples: Sequence[Sample], tile: int) -> tuple[float, float, int, float]:
    columns = [[_padded_flop(s, tile), 1.0] for s in samples]
    (per_flop, fill_s), error = solve(columns, [s["seconds"] for s in samples])
    return 1.0 / per_flop, fill_s / per_flop, tile, error


def _padded_flop(s: Sample, tile: int) -> float:
    return 2.0 * s["batch"] * ceil(s["m"] / tile) * ceil(s["n"] / tile) * tile**2 * s["k"]


def fit_traffic(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Bytes per second of the optimizer, what part of it one op of each other kind reaches, as a layer has some of each, and
    the median error of single ones. What counts are the largest tensors, which no cache holds."""
    by_op: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_op[sample["op"]].append(sample)
    if STREAMING not in by_op or len(by_op) < 2:
        raise TunerError(f"of the ops bound by memory only {', '.join(by_op)} could be measured")
    streams = max(by_op.pop(STREAMING), key=lambda s: s["bytes"])
    bandwidth = streams["bytes"] / streams["seconds"]
    largest = min(max(s["elements"] for s in found) for found in by_op.values())
    alike = [s for found in by_op.values() for s in found if s["elements"] == largest]
    reached = sum(s["bytes"] for s in alike) / sum(s["seconds"] for s in alike)
    errors = [abs(s["bytes"] / reached / s["seconds"] - 1) for found in by_op.values() for s in found]
    return bandwidth, min(1.0, reached / bandwidth), float(np.median(errors))


def fit_collectives(samples: Sequence[Sample], bandwidth: float) -> tuple[LinkFit, float]:
    """The terms of a collective, and the median error. ``bandwidth`` is that of device memory."""
    columns = [_collective_terms(s["collective"], s["ranks"], s["bytes"]) for s in samples]
    (launch, step, per_byte, per_pass), error = solve(columns, [s["seconds"] for s in samples])
    if not per_byte:
        raise TunerError("the time of the measured collectives does not grow with their size: the link cannot be measured")
    return LinkFit(launch, step, 1.0 / per_byte, per_pass * bandwidth), error


def _collective_terms(name: str, ranks: int, nbytes: float) -> list[float]:
    """Launches, steps, bytes moved, and bytes of one pass through memory."""
    if name == "p2p":  # there and back
        return [2.0, 2.0, 2.0 * nbytes, 0.0]
    phases = 2 if name == "all_reduce" else 1
    return [1.0, phases * (ranks - 1.0), phases * (ranks - 1) / ranks * nbytes, phases / 2 * nbytes]


def solve(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Coefficients of the columns, none below zero, and the median of their relative errors."""
    times = np.asarray(seconds)
    rows = np.asarray(columns) / times[:, None]
    weights = np.ones(len(times))
    kept = list(range(rows.shape[1]))
    found = np.zeros(rows.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        scale = np.abs(rows).max(axis=0)  # columns of FLOP and of ones differ by 1e10
        found = np.zeros(rows.shape[1])
        while kept:
            part = np.linalg.lstsq(rows[:, kept] / scale[kept] * root[:, None], root, rcond=None)[0] / scale[kept]
            if part.min() >= 0:
                found[kept] = part
                break
            kept.remove(kept[int(np.argmin(part * scale[kept]))])
        residual = np.abs(rows @ found - 1)
        weights = 1 / np.maximum(residual, _SMALLEST_RESIDUAL)
    return [float(x) for x in found], float(np.median(residual))


def _reason(samples: Sequence[Sample], kind: str) -> str:
    return next((s["skipped"] for s in samples if s["kind"] == kind and "skipped" in s), "none was told")
