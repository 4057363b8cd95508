"""Formats quantities and candidates for messages, tables and explanations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 step``, ``2 steps``; give ``plural`` if it is irregular."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def spell_seconds(seconds: float) -> str:
    """Three significant digits, ``1.03 s``, ``12.3 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if abs(seconds) * scale >= 1:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def spell_bytes(size: float) -> str:
    """Three significant digits in binary units, ``48.5 GiB``."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{_three_digits(size / scale)} {unit}"
    return f"{size:.0f} B"


def spell_degrees(degrees: Mapping[str, int]) -> str:
    """``pp 1 x dp 4 x mp 2``."""
    return " x ".join(f"{axis} {degrees[axis]}" for axis in ("pp", "dp", "mp"))


def spell_candidate(candidate: Mapping[str, Any]) -> str:
    """``pp 1 x dp 4 x mp 2, micro batch 4, full recomputation``: the degrees, and everything that is not the default."""
    parts = [spell_degrees(candidate)]
    if candidate.get("ep", 1) > 1:
        parts.append(f"ep {candidate['ep']}")
    if "micro_batch" in candidate:
        parts.append(f"micro batch {candidate['micro_batch']}")
    if candidate.get("recompute", "none") != "none":
        parts.append(f"{candidate['recompute']} recomputation")
    if candidate.get("sharding_stage"):
        over = candidate.get("sharding_degree", "whole")
        parts.append(f"sharding stage {candidate['sharding_stage']}" + (f" over {over} replicas" if over != "whole" else ""))
    if candidate.get("sequence_parallel"):
        parts.append("sequence parallel")
    if candidate.get("schedule", "1F1B") != "1F1B":
        chunks = f" of {candidate['vpp']} chunks" if candidate.get("vpp", 1) > 1 else ""
        parts.append(f"{candidate['schedule']}{chunks}")
    if list(candidate.get("axes", ())) == ["mp", "dp"]:
        parts.append("mp outside dp")
    return ", ".join(parts)


def _three_digits(x: float) -> str:
    return f"{x:.0f}" if abs(x) >= 100 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.2f}"
