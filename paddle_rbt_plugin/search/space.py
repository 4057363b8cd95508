"""The space of candidates: every way to use the devices, less what the user, the model or the cluster rules out.

Each (pp, dp, mp) whose product is the number of devices appears either in a candidate or in a rejection with its reason.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from paddle_rbt_plugin.cluster import Cluster, factorisations
from paddle_rbt_plugin.cost.candidate import Candidate, Training
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.search.analysis import Analysis

_INTEGERS = ("pp", "dp", "mp", "micro_batch", "accumulate_steps", "sharding_stage", "vpp")
_CHOICES = {"recompute": ("none", "selective", "full"), "schedule": ("FThenB", "1F1B", "VPP"), "order": ("dp_mp", "mp_dp")}
_MAX_MICRO_BATCH = 32
"""A micro batch beyond this gains nothing on any device and only costs memory; a larger one can be asked for."""


@dataclass(frozen=True)
class Rejected:
    """A part of the space that cannot run, and why. ``missing_bytes`` is set where memory is what it lacks."""

    candidate: dict[str, Any]
    reason: str
    missing_bytes: int = 0


@dataclass(frozen=True)
class SearchSpace:
    """Allowed values per dimension; None leaves the choice to the tuner. ``order`` is the order of a stage's mesh axes."""

    pp: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    mp: tuple[int, ...] | None = None
    micro_batch: tuple[int, ...] | None = None
    accumulate_steps: tuple[int, ...] | None = None
    recompute: tuple[str, ...] | None = None
    sharding_stage: tuple[int, ...] | None = None
    sequence_parallel: tuple[bool, ...] | None = None
    schedule: tuple[str, ...] | None = None
    vpp: tuple[int, ...] | None = None
    order: tuple[str, ...] | None = None
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Who fixed a dimension, where it was not the user's search space: shown with the rejections that follow from it."""

    @classmethod
    def parse(cls, values: Mapping[str, Any] | None) -> SearchSpace:
        """The space that a dict fixes (``{"mp": 2}``), lists (``{"mp": [1, 2]}``) or leaves open (``{"mp": "auto"}``).

        Raises TunerError for an unknown dimension or a value it cannot take."""
        known = [f.name for f in fields(cls) if f.name != "reasons"]
        parsed: dict[str, Any] = {}
        for key, value in (values or {}).items():
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TunerError(f"search_space: unknown dimension {key!r}{hint} (known: {', '.join(known)})")
            if value is None or value == "auto":
                continue
            listed = list(value) if isinstance(value, (list, tuple, set)) else [value]
            if not listed:
                raise TunerError(f"search_space: {key!r} has no value; name at least one or leave it out")
            parsed[key] = tuple(dict.fromkeys(_value(key, v) for v in listed))
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
        source = self.reasons.get(key, "search_space")
        return f"{source} allows {key} {', '.join(map(str, allowed))} only"


def _value(key: str, value: Any) -> Any:
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            raise TunerError(f"search_space: {key} cannot be {value!r}; choose from {', '.join(_CHOICES[key])}")
        return value
    if key == "sequence_parallel":
        if value not in (0, 1, True, False):
            raise TunerError(f"search_space: sequence_parallel is true or false, not {value!r}")
        return bool(value)
    least, most = (0, 3) if key == "sharding_stage" else (1, None)
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        right = "0, 1, 2 or 3" if most else "a whole number of at least 1"
        raise TunerError(f"search_space: {key} must be {right}, not {value!r}")
    return value


def candidates(
    analysis: Analysis, cluster: Cluster, training: Training, space: SearchSpace
) -> tuple[list[Candidate], list[Rejected]]:
    """Every candidate worth an estimate, and every factorisation that is none, with the reason."""
    found: list[Candidate] = []
    rejected: list[Rejected] = []
    for pp, dp, mp in factorisations(cluster.device_count):
        degrees = {"pp": pp, "dp": dp, "mp": mp}
        reason = _rules_out(analysis, training, space, degrees)
        some = [] if reason else list(_variants(analysis, training, space, pp, dp, mp))
        if not some:
            reason = reason or f"no micro batch of {training.global_batch // dp} per replica fits the search space"
            rejected.append(Rejected(degrees, reason))
        found += some
    return found, rejected


def _rules_out(analysis: Analysis, training: Training, space: SearchSpace, degrees: Mapping[str, int]) -> str:
    for key, value in degrees.items():
        reason = space.forbids(key, value)
        if reason:
            return reason
    if not analysis.matches.matches and degrees["dp"] < degrees["pp"] * degrees["dp"] * degrees["mp"]:
        return "no pattern matches the model, so only data parallelism is planned"
    layers = analysis.layers.count
    if degrees["pp"] > layers:
        return f"pp {degrees['pp']} exceeds the {layers} layer{'s' if layers > 1 else ''} of the model"
    if training.global_batch % degrees["dp"]:
        return f"dp {degrees['dp']} does not divide the global batch of {training.global_batch}"
    if degrees["mp"] > 1 and not any("mp" in spec for spec, _ in analysis.claims.values()):
        return "no pattern that matched shards anything along mp"
    return analysis.indivisible({axis: n for axis, n in degrees.items() if axis != "pp"})


def _variants(analysis: Analysis, training: Training, space: SearchSpace, pp: int, dp: int, mp: int) -> Iterator[Candidate]:
    """The candidates of one factorisation."""
    per_replica = training.global_batch // dp
    orders = _choose(space.order, ["dp_mp"]) if dp > 1 and mp > 1 else ["dp_mp"]
    recomputes: Sequence[Any] = _choose(space.recompute, ["none", "full"]) if training.mode == "train" else ["none"]
    for micro_batch in _micro_batches(space, per_replica, pp):
        steps = per_replica // micro_batch
        if space.forbids("accumulate_steps", steps):
            continue
        for schedule, vpp in _schedules(space, pp, steps, analysis.layers.count):
            for order in orders:
                for recompute in recomputes:
                    for stage in _choose(space.sharding_stage, [0]):
                        for sequence_parallel in _choose(space.sequence_parallel, [False]):
                            if (stage and dp == 1) or (sequence_parallel and mp == 1):
                                continue
                            yield Candidate(
                                pp, dp, mp, micro_batch, steps, tuple(order.split("_")), recompute, stage, sequence_parallel,
                                schedule, vpp,
                            )  # fmt: skip


def _micro_batches(space: SearchSpace, per_replica: int, pp: int) -> list[int]:
    divisors = [m for m in range(1, per_replica + 1) if per_replica % m == 0]
    if space.micro_batch is not None:
        return [m for m in divisors if m in space.micro_batch]
    if space.accumulate_steps is not None:
        return divisors
    return [m for m in divisors if m <= _MAX_MICRO_BATCH] if pp > 1 or per_replica > 1 else divisors


def _schedules(space: SearchSpace, pp: int, steps: int, layers: int) -> Iterator[tuple[Any, int]]:
    if pp == 1:
        yield "1F1B", 1
        return
    for schedule in _choose(space.schedule, ["1F1B"]):
        if schedule != "VPP":
            yield schedule, 1
            continue
        for vpp in _choose(space.vpp, [2]):
            if vpp > 1 and layers % (pp * vpp) == 0 and steps % pp == 0:
                yield schedule, vpp


def _choose(allowed: Sequence[Any] | None, usual: Sequence[Any]) -> Sequence[Any]:
    return usual if allowed is None else allowed


def candidate_dict(candidate: Candidate) -> dict[str, Any]:
    """A candidate as plain JSON values."""
    return asdict(candidate) | {"axes": list(candidate.axes)}
