"""Why candidates are rejected: as data, and in the only words for it.

A ``Reason`` has a kind and figures; ``_WORDS`` has the sentence of every kind. Code that groups or compares reasons uses the
data: reasons of one kind that differ in numbers only are alike, and the one with the smallest numbers is the nearest miss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddle_rbt_plugin.spelling import counted, spell_bytes


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


_WORDS: dict[str, Callable[..., str]] = {
    "space": lambda source, key, allowed: f"{source} allows {key} {_listed(allowed)} only",
    "choice": lambda asked, key, legal: f"no candidate has {asked}" + (f"; {key} can be {legal}" if key else ""),
    "patterns": lambda: "no pattern matches the model, so only data parallelism is planned",
    "axis": lambda axis: f"no pattern that matched shards anything along {axis}",
    "layers": lambda pp, layers: f"pp {pp} exceeds the {counted(layers, 'layer')} of the model",
    "interleaving": lambda asked: f"{asked} interleaves pipeline stages, and there is only one",
    "batch": lambda dp, batch, legal, what: f"dp {dp} does not divide the {what} of {batch}" + (
        f" (legal: {legal})" if legal else ""
    ),
    "divides": lambda degree, size, axis, meaning, dim, tensor, pattern, legal: (
        f"{axis} {degree} does not divide the {size} {meaning} (dim {dim} of {tensor}, pattern {pattern}; legal: {legal})"
    ),
    "experts": lambda ep, dp: (
        f"ep {ep} is neither 1 nor dp {dp}: experts are divided over all ranks of dp, or not at all"
    ),
    "experts_zero": lambda source, allowed: (
        f"{source} allows sharding_stage {_listed(allowed)} only, and experts are divided without ZeRO"
    ),
    "completion": lambda pattern, dim, tensor, axis: (
        f"pattern {pattern} shards dim {dim} of {tensor} along {axis}, but Paddle's completion gives it up"
    ),
    "uneven": lambda size, degree, dim, tensor, axis: (
        f"Paddle divides dim {dim} of {tensor}, of size {size}, along {axis} {degree}"
    ),
    "memory": lambda missing_bytes, peak_bytes, limit_bytes, device: (
        f"needs {spell_bytes(peak_bytes)}, {spell_bytes(missing_bytes)} more than the {spell_bytes(limit_bytes)} that {device} "
        "has less its reserve"
    ),
}  # fmt: skip
"""By kind, the sentence that its figures make."""


@dataclass(frozen=True)
class Reason:
    """Why a way to use the devices, or a candidate, is ruled out."""

    kind: str
    """``space``, ``choice``, ``patterns``, ``axis``, ``layers``, ``interleaving``, ``batch``, ``divides``, ``experts``,
    ``experts_zero``, ``completion``, ``uneven`` or ``memory``."""
    figures: Mapping[str, Any]
    """What the kind is about, by name; plain JSON values. The names that end in ``bytes`` are bytes."""

    def __str__(self) -> str:
        return _WORDS[self.kind](**self.figures)


def reason(kind: str, **figures: Any) -> Reason:
    """A reason of a kind; sequences among its figures become lists, as in JSON."""
    return Reason(kind, {name: list(value) if isinstance(value, tuple) else value for name, value in figures.items()})


@dataclass(frozen=True)
class Rejected:
    """A way to use the devices that the space, the model or the cluster rules out, and why; or those of its candidates that
    do not fit the memory, named by the nearest of them."""

    candidate: dict[str, Any]
    reason: Reason
    count: int = 0
    """How many candidates do not fit; 0 for a whole way."""

    @property
    def missing_bytes(self) -> int:
        """What the nearest lacks; 0 where it is not memory."""
        return self.reason.figures.get("missing_bytes", 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as in a plan."""
        told = {"candidate": self.candidate, "kind": self.reason.kind, "reason": str(self.reason)}
        return told | {"figures": dict(self.reason.figures)} | ({"count": self.count} if self.count else {})


def alike(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for entries of ``Rejected.to_dict`` whose reasons differ in numbers, lists and tensors only."""
    words = (v for k, v in entry["figures"].items() if isinstance(v, str) and k not in ("tensor", "legal"))
    return entry["kind"], *words, *(() if entry["figures"] else (entry["reason"],))


def nearness(entry: Mapping[str, Any]) -> tuple[float, ...]:
    """The numbers of an entry's reason; the smaller, the nearer the candidate is to being right."""
    return tuple(v for v in entry["figures"].values() if isinstance(v, (int, float)))
