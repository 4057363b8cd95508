"""Values of the search space that no candidate has: which dimension rules them out, and what it could be instead.

Both questions are answered by enumeration. A dimension is to blame where freeing it alone gives candidates, and the values that
these have are the right ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from paddle_rbt_plugin.cost.candidate import Candidate
from paddle_rbt_plugin.errors import NoFeasiblePlan
from paddle_rbt_plugin.notes import Note, note
from paddle_rbt_plugin.search.dimensions import ALL, DEGREES, SearchSpace
from paddle_rbt_plugin.search.rejections import Reason, reason

Enumerate = Callable[[SearchSpace], Iterable[Candidate]]
"""The candidates of a space; of all ways to use the devices, or of one."""

_MOST_SHOWN = 12
_MOST_NUMBER = {"sharding_degree": 2**12, "micro_batch": 2**24, "accumulate_steps": 2**24}
"""Up to where the right values of a number are looked for."""
_EVERY = (
    "vpp", "schedule", "sharding_degree", "sharding_stage", "sequence_parallel", "order", "recompute", "micro_batch",
    "accumulate_steps",
)  # fmt: skip
"""The choices beyond the degrees, the more special first."""
_TRAINING_ONLY = {"recompute", "sharding_stage", "sharding_degree"}


def why_none(space: SearchSpace, candidates: Enumerate) -> Reason:
    """Why a space has no candidate of some way to use the devices: the dimension that rules them out, and what it can be."""
    fixed = [key for key in _EVERY if getattr(space, key) is not None]
    for key in fixed:
        legal = _values(key, candidates(_free(space, key)))
        if legal:
            return reason("choice", asked=_asked(space, key), key=key, legal=_spell(legal))
    return reason("choice", asked=" and ".join(_asked(space, key) for key in fixed), key="", legal="")


def check_met(space: SearchSpace, candidates: Enumerate, train: bool) -> None:
    """Raises NoFeasiblePlan where candidates exist, but a dimension that the user fixed has none of its values in any of them.

    What a strategy or an executor fixes beside the search space may be without meaning for a plan."""
    for key in _EVERY:
        if getattr(space, key) is None or key in space.reasons or (not train and key in _TRAINING_ONLY):
            continue
        if not any(_has(space, key, c) for c in candidates(space)):
            raise NoFeasiblePlan(_why_unmet(space, key, candidates))


def interleaving(space: SearchSpace) -> str:
    """What the user fixes that only interleaved pipelines have; empty where nothing is."""
    for key, plain in (("vpp", {1}), ("schedule", {"1F1B", "FThenB"})):
        values = getattr(space, key)
        if values is not None and key not in space.reasons and plain.isdisjoint(values):
            return _asked(space, key)
    return ""


def ignored(space: SearchSpace, train: bool) -> Note | None:
    """A note on the settings of the space that the mode has no use for; None if there are none. An engine that evaluates with
    training settings need not take them back."""
    asked = [_asked(space, key) for key in sorted(_TRAINING_ONLY) if not train and getattr(space, key) is not None]
    return note("ignored", asked=asked) if asked else None


def _why_unmet(space: SearchSpace, key: str, candidates: Enumerate) -> str:
    asked = f"no candidate has {_asked(space, key)}"
    for other in (*_EVERY, *DEGREES):
        if other == key or getattr(space, other) is None:
            continue
        legal = _values(other, (c for c in candidates(_free(space, other)) if _has(space, key, c)))
        if legal:
            return f"{asked} where {other} is {_spell(getattr(space, other))}; {other} would have to be {_spell(legal)}"
    legal = _values(key, candidates(_free(space, key)))
    return f"{asked}; {key} can be {_spell(legal)}"


def _free(space: SearchSpace, key: str) -> SearchSpace:
    """The space in which a dimension may have any value."""
    every: Any = ALL.get(key)
    if key == "sharding_degree":
        every = ("whole", *range(2, 1 + _MOST_NUMBER[key]))
    elif key in _MOST_NUMBER:
        every = range(1, 1 + _MOST_NUMBER[key])  # has values as a tuple has
    return replace(space, **{key: every})


def _has(space: SearchSpace, key: str, candidate: Candidate) -> bool:
    return any(value in getattr(space, key) for value in _of(key, candidate))


def _of(key: str, candidate: Candidate) -> tuple[Any, ...]:
    """The values that a candidate has in a dimension: all replicas are a number and the ``whole``."""
    if key == "order":
        return ("_".join(candidate.axes),)
    if key == "sharding_degree" and candidate.sharding_stage:
        return candidate.sharding_degree, candidate.shards(candidate.dp)
    return (getattr(candidate, key),)


def _values(key: str, candidates: Iterable[Candidate]) -> list[Any]:
    return sorted({value for c in candidates for value in _of(key, c)}, key=lambda v: (isinstance(v, str), v))


def _asked(space: SearchSpace, key: str) -> str:
    return f"{key} {_spell(getattr(space, key))} of {space.source(key)}"


def _spell(values: Sequence[Any]) -> str:
    shown = [*map(str, islice(values, _MOST_SHOWN)), *(["..."] if len(values) > _MOST_SHOWN else [])]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
