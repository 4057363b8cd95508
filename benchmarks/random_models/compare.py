"""Puts what the ranks of a job hold together, and compares it with what one process has trained.

- **Losses**: of every step, ``|a - b| / max(|b|, 0.01)``; every rank must show that of the whole batch.
- **Weights**: the largest ``|a - b|`` of a tensor over how far training has moved it, at least 0.01. So a weight that
  moved by 0.02 may differ by 2e-6; measured against its size, a wrong gradient would hide behind a small learning rate.
- **States**: the same over the largest number of the state, at least 0.01.
- **Copies**: whatever several ranks hold of the same tensor must be the same, measured as weights are.

Where the weights of training explode, or a loss has kinks, rounding grows. So a difference is compared with what becomes of the
serial run when its initial weights change by a few units in the last place (``noise``): one below ten times that says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LOSS = 1e-5
WEIGHT = 1e-4
LEAST = 1e-2
TIMES_NOISE = 10


@dataclass(frozen=True)
class Difference:
    """The largest differences, each with where it is."""

    loss: float = 0.0
    weight: float = 0.0
    state: float = 0.0
    copies: float = 0.0
    where: str = ""

    @property
    def kind(self) -> str:
        """``loss``, ``weight``, ``copies`` or ``state``, the first that is too large; empty where none is."""
        return self.beyond(Difference())

    def beyond(self, noise: Difference) -> str:
        """The same, where rounding alone explains ``noise``."""
        rounding = max(noise.loss, noise.weight, noise.state)
        for name, limit in (("copies", WEIGHT), ("loss", LOSS), ("weight", WEIGHT), ("state", WEIGHT)):
            unexplained = TIMES_NOISE * (rounding if name == "copies" else getattr(noise, name))
            if not getattr(self, name) <= max(limit, unexplained):  # one that is not a number is too large
                return name
        return ""


def compare(serial: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> Difference:
    """Compares the answers of the ranks with that of one process."""
    loss, loss_where = _losses(serial["losses"], [r["losses"] for r in ranks])
    whole, start = _arrays(serial), _initial(serial)
    held = [_arrays(r) for r in ranks]
    worst = {"weight": (0.0, ""), "state": (0.0, ""), "copies": (0.0, "")}
    missing = ""
    for key, right in whole.items():
        parts = [
            (h[key], dict(map(tuple_of, r["parts"]))[key], r["mesh"]) for h, r in zip(held, ranks, strict=True) if key in h
        ]
        kind = key.split(" ", 1)[0]
        if len(parts) < len(ranks):
            missing = missing or (key if kind == "weight" else "")
            continue
        moved = abs(right - start[key]).max() if key in start else abs(right).max()
        scale = float(max(moved if kind == "weight" else abs(right).max(), LEAST))
        found, spread = _assembled(parts, right.shape)
        if found is None:
            missing = missing or f"{key} (shapes do not fit)"
            continue
        for name, size in ((kind, abs(found - right).max() / scale), ("copies", spread / scale)):
            if not size <= worst[name][0]:
                worst[name] = (float(size), key)
    if missing:
        return Difference(loss, math.inf, where=f"weight not found: {missing}")
    where = [f"{n} {v[0]:.1e} at {v[1]}" for n, v in worst.items() if v[0] > 0]
    sizes = {n: v[0] for n, v in worst.items()}
    return Difference(
        loss, sizes["weight"], sizes["state"], sizes["copies"], "; ".join([f"loss {loss:.1e} {loss_where}", *where])
    )


def tuple_of(pair: Sequence[Any]) -> tuple[Any, Any]:
    return pair[0], pair[1]


def _losses(right: Sequence[float], ranks: Sequence[Sequence[float]]) -> tuple[float, str]:
    if any(len(r) != len(right) for r in ranks):
        return math.inf, f"of {[len(r) for r in ranks]} steps, not {len(right)}"
    worst, where = 0.0, ""
    for step, value in enumerate(right):
        shown = np.array([r[step] for r in ranks])
        size = abs(shown - value).max() / max(abs(value), 1e-2)
        if not size <= worst:
            worst, where = float(size), f"at step {step}: {value:.7g} alone, {', '.join(f'{v:.7g}' for v in shown)}"
    return worst, where


def _arrays(answer: dict[str, Any]) -> dict[str, np.ndarray]:
    with np.load(answer["path"], allow_pickle=False) as file:
        return {key: file[f"a{i}"].astype("float64") for i, (key, _) in enumerate(answer["parts"])}


def _initial(serial: dict[str, Any]) -> dict[str, np.ndarray]:
    with np.load(serial["path"], allow_pickle=False) as file:
        keys = [key for key, _ in serial["parts"]]
        return {key: file[f"b{i}"].astype("float64") for i, key in enumerate(keys) if f"b{i}" in file}


def _assembled(parts: Sequence[tuple[np.ndarray, list[int], dict[str, Any]]], shape: tuple[int, ...]) -> tuple[Any, float]:
    """The whole tensor, and the largest difference between copies of it; None where the parts do not make that shape."""
    whole = np.full(shape, np.nan)
    spread = 0.0
    for rank, (array, dims, mesh) in enumerate(parts):
        index: list[slice] = []
        if max(dims, default=-1) >= 0:
            coordinates = np.argwhere(np.array(mesh["ranks"]).reshape(mesh["shape"]) == rank)[0]
            for size, axis in zip(array.shape, dims, strict=True):
                at = 0 if axis < 0 else int(coordinates[axis])
                index.append(slice(at * size, (at + 1) * size))
        elif array.size == math.prod(shape):
            array = array.reshape(shape)
        target = whole[tuple(index)]
        if target.shape != array.shape:
            return None, 0.0
        known = ~np.isnan(target)
        if known.any():
            spread = max(spread, float(abs(target - array)[known].max()))
        whole[tuple(index)] = array if not known.any() else target
    return whole, spread


def remove(answers: Sequence[dict[str, Any] | None]) -> None:
    """Deletes the files of answers."""
    for answer in answers:
        if answer and "path" in answer:
            Path(answer["path"]).unlink(missing_ok=True)
