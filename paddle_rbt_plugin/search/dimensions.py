"""The dimensions of the search space: what each can be, and what a user, a strategy or an executor allows of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isqrt
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.validation import Kind, check, check_known, one_of, whole

DEGREES = ("pp", "dp", "mp")
_CHOICES = {
    "recompute": ("none", "selective", "full"),
    "schedule": ("FThenB", "1F1B", "VPP"),
    "order": ("dp_mp", "mp_dp"),
    "layer_meshes": ("one", "any"),
}
ALL: dict[str, tuple[Any, ...]] = {**_CHOICES, "sharding_stage": (0, 1, 2, 3), "sequence_parallel": (False, True)}
"""All values of the dimensions that are no numbers without a bound."""

_KINDS: dict[str, Kind] = {
    **{name: one_of(*values) for name, values in _CHOICES.items()},
    "sharding_stage": Kind("0, 1, 2 or 3", whole(0, 3).type),
    "sharding_degree": Kind("a whole number of at least 2, or 'whole'", whole(2).type | Literal["whole"]),
    "sequence_parallel": Kind(
        "true or false", Annotated[bool, Field(strict=True), BeforeValidator(lambda v: bool(v) if v in (0, 1) else v)]
    ),
}
"""What a value of a dimension is; of those that are not here, a whole number of at least 1."""

_ELSEWHERE = {
    "tp": "mp",
    "mbs": "micro_batch",
    "gradient_accumulation": "accumulate_steps",
    "zero": "sharding_stage",
    "sharding": "sharding_stage",
    "sp": "sequence_parallel",
    "recomputation": "recompute",
}
"""Dimensions by the names that other frameworks give them."""


def divisors(n: int) -> list[int]:
    """The divisors of a number, growing."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


@dataclass(frozen=True)
class SearchSpace:
    """Allowed values per dimension; None leaves the choice to the tuner. ``order`` is the order of a stage's mesh axes: the
    last runs inside a machine."""

    pp: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    mp: tuple[int, ...] | None = None
    ep: tuple[int, ...] | None = None
    micro_batch: tuple[int, ...] | None = None
    accumulate_steps: tuple[int, ...] | None = None
    recompute: tuple[str, ...] | None = None
    sharding_stage: tuple[int, ...] | None = None
    sharding_degree: tuple[int | str, ...] | None = None
    sequence_parallel: tuple[bool, ...] | None = None
    schedule: tuple[str, ...] | None = None
    vpp: tuple[int, ...] | None = None
    order: tuple[str, ...] | None = None
    layer_meshes: tuple[str, ...] | None = None
    """Level o2: ``one`` arrangement of devices for all layers of a plan, or ``any`` for each layer."""
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Who fixed a dimension, where it was not the user's search space: shown with the rejections that follow from it."""

    @classmethod
    def parse(cls, values: Mapping[str, Any] | None) -> SearchSpace:
        """The space that a dict fixes (``{"mp": 2}``), lists (``{"mp": [1, 2]}``) or leaves open (``{"mp": "auto"}``).

        Raises TunerError for an unknown dimension or a value it cannot take."""
        known = [f.name for f in fields(cls) if f.name != "reasons"]
        parsed: dict[str, Any] = {}
        check_known("search_space: unknown dimension", values or {}, known, aliases=_ELSEWHERE)
        for key, value in (values or {}).items():
            if value is None:
                continue
            if isinstance(value, str) and value == "auto":
                if key in ALL:
                    parsed[key] = ALL[key]
                continue
            listed = list(value) if isinstance(value, (list, tuple, set)) else [value]
            kind = _KINDS.get(key, whole())
            if not listed:
                raise TunerError(f"search_space: {key!r} has no value; name at least one or leave it out")
            parsed[key] = tuple(dict.fromkeys(check(kind, key, v, place="search_space: ") for v in listed))
        return cls(**parsed)

    def restrict(self, reason: str, **values: tuple) -> SearchSpace:
        """The space within further constraints, each with the reason for it.

        Raises TunerError where a constraint leaves nothing of what the space allows."""
        fixed = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "reasons"}
        reasons = dict(self.reasons)
        for key, allowed in values.items():
            both = tuple(v for v in allowed if fixed[key] is None or v in fixed[key])
            if not both:
                raise TunerError(
                    f"search_space allows {key} in {list(fixed[key])}, but {reason} needs {key} in {list(allowed)}"
                )
            fixed[key] = both
            reasons[key] = reason
        return SearchSpace(**fixed, reasons=reasons)

    def forbids(self, key: str, value: Any) -> str:
        """Why a value is outside of the space; empty where it is inside."""
        allowed = getattr(self, key)
        if allowed is None or value in allowed:
            return ""
        return f"{self.source(key)} allows {key} {', '.join(map(str, allowed))} only"

    def source(self, key: str) -> str:
        """Who says what a dimension may be."""
        return self.reasons.get(key, "search_space")
