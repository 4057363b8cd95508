"""The space of candidates: every way to use the devices, less what the user, the model or the cluster rules out.

    { (pp, dp, mp, ep, micro batch, recompute, ZeRO stage and degree, sequence parallelism, schedule, vpp, order of axes) :
          pp dp mp = devices,  micro batch * accumulate steps * dp = global batch }

Each (pp, dp, mp) whose product is the number of devices appears either in a candidate or in a rejection with its reason
(``ways``, ``_rules_out``); ``variants`` are the candidates of one of them. Any dimension can be fixed or listed; ``"auto"`` is
all of its values. Left alone, all values of a dimension are searched, except where the others cannot win:

- FThenB runs the passes of 1F1B in another order: with equal stages it takes the same time, and keeps all micro batches.
- Axes run dp outside, mp inside. Tensor parallelism communicates several times per layer and micro batch and nothing
  hides it; data parallelism once per step. Only where mp alone is larger than a machine does it leave the machine.
- States are split over the whole data-parallel group, and at ZeRO stages 2 and 3 also over the part of it that shares a machine
  (``sharding_degree``). Stage 1 sends as many bytes between machines either way, so that a part only costs memory.
- Micro batches of more than 32 samples per rank (``MAX_MICRO_BATCH``): products have reached the device's peak long before.
- Experts of a mixture stay whole on every rank (ep 1) or are divided over all ranks of dp (ep = dp, as in GShard, arXiv
  2006.16668): a tensor dimension lies along one mesh axis, so dp cannot be split into an ep and the rest. ZeRO would split the
  experts' states over the very ranks that hold different experts, so it is not combined with ep.
- An interleaved schedule cuts evenly (pp * vpp divides the layers) and takes groups of pp micro batches, as Paddle's does.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import product
from typing import Any, Literal

from paddle_rbt_plugin.cluster import Cluster, factorisations
from paddle_rbt_plugin.cost.candidate import Candidate, Training
from paddle_rbt_plugin.errors import NoFeasiblePlan, TunerError
from paddle_rbt_plugin.search.analysis import Analysis
from paddle_rbt_plugin.search.unmet import check_met, why_none

_DEGREES = ("pp", "dp", "mp")
_CHOICES = {
    "recompute": ("none", "selective", "full"),
    "schedule": ("FThenB", "1F1B", "VPP"),
    "order": ("dp_mp", "mp_dp"),
    "layer_meshes": ("one", "any"),
}
_ALL: dict[str, tuple[Any, ...]] = {**_CHOICES, "sharding_stage": (0, 1, 2, 3), "sequence_parallel": (False, True)}
MAX_MICRO_BATCH = 32
"""Samples; a larger micro batch is searched where it is asked for."""
_DEFAULT = {"schedule": ("1F1B", "VPP"), "order": ("dp_mp",)}
"""The values searched where the user says nothing, for the dimensions in which that is not all of them."""


@dataclass(frozen=True)
class Rejected:
    """A way to use the devices that the space, the model or the cluster rules out, and why; or those of its candidates that
    do not fit the memory, named by the nearest of them."""

    candidate: dict[str, Any]
    reason: str
    missing_bytes: int = 0
    """What the nearest lacks; 0 where it is not memory."""
    count: int = 0
    """How many candidates do not fit; 0 for a whole way."""


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
        for key, value in (values or {}).items():
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TunerError(f"search_space: unknown dimension {key!r}{hint} (known: {', '.join(known)})")
            if value is None:
                continue
            if isinstance(value, str) and value == "auto":
                if key in _ALL:
                    parsed[key] = _ALL[key]
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
        return f"{self.source(key)} allows {key} {', '.join(map(str, allowed))} only"

    def source(self, key: str) -> str:
        """Who says what a dimension may be."""
        return self.reasons.get(key, "search_space")


def _value(key: str, value: Any) -> Any:
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            raise TunerError(f"search_space: {key} cannot be {value!r}; choose from {', '.join(_CHOICES[key])}")
        return value
    if key == "sharding_degree" and value == "whole":
        return value
    if key == "sequence_parallel":
        if value not in (0, 1, True, False):
            raise TunerError(f"search_space: sequence_parallel is true or false, not {value!r}")
        return bool(value)
    least, most = {"sharding_stage": (0, 3), "sharding_degree": (2, None)}.get(key, (1, None))
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        right = "0, 1, 2 or 3" if most else f"a whole number of at least {least}"
        right += ", or 'whole'" if key == "sharding_degree" else ""
        raise TunerError(f"search_space: {key} must be {right}, not {value!r}")
    return value


@dataclass(frozen=True)
class Degrees:
    """One way to use all devices. ``ep`` of the ``dp`` ranks, all or 1, hold different experts."""

    pp: int
    dp: int
    mp: int
    ep: int = 1

    @classmethod
    def of(cls, candidate: Candidate) -> Degrees:
        return cls(candidate.pp, candidate.dp, candidate.mp, candidate.ep)

    def to_dict(self) -> dict[str, int]:
        """The degrees by axis, ``ep`` only where experts are divided."""
        return {"pp": self.pp, "dp": self.dp, "mp": self.mp} | ({"ep": self.ep} if self.ep > 1 else {})


def ways(analysis: Analysis, cluster: Cluster, training: Training, space: SearchSpace) -> tuple[list[Degrees], list[Rejected]]:
    """Every factorisation of the devices that may run, and every other one with the reason.

    Raises NoFeasiblePlan where the degrees that the search space allows do not use the devices exactly, and where a dimension
    that it fixes has none of its values in any candidate."""
    _check_degrees(space, cluster)
    found: list[Degrees] = []
    rejected: list[Rejected] = []
    for degrees in _all_degrees(analysis, cluster, space):
        reason = _rules_out(analysis, training, space, degrees.to_dict())
        if not reason and next(variants(analysis, cluster, training, space, degrees), None) is None:
            reason = why_none(space, partial(variants, analysis, cluster, training, degrees=degrees))
        if reason:
            rejected.append(Rejected(degrees.to_dict(), reason))
        else:
            found.append(degrees)
    if found:
        check_met(space, partial(_every_candidate, analysis, cluster, training), training.mode == "train")
    return found, rejected


def _every_candidate(analysis: Analysis, cluster: Cluster, training: Training, space: SearchSpace) -> Iterator[Candidate]:
    for degrees in _all_degrees(analysis, cluster, space):
        if not _rules_out(analysis, training, space, degrees.to_dict()):
            yield from variants(analysis, cluster, training, space, degrees)


def _all_degrees(analysis: Analysis, cluster: Cluster, space: SearchSpace) -> Iterator[Degrees]:
    for pp, dp, mp in factorisations(cluster.device_count):
        chosen = space.ep or ((1, dp) if "ep" in analysis.axes else (1,))
        yield from (Degrees(pp, dp, mp, ep) for ep in dict.fromkeys(chosen))


def _check_degrees(space: SearchSpace, cluster: Cluster) -> None:
    devices = cluster.device_count
    ways = [dict(zip(_DEGREES, degrees, strict=True)) for degrees in factorisations(devices)]
    for key in _DEGREES:
        allowed = getattr(space, key)
        if allowed is not None and not any(devices % n == 0 for n in allowed):
            legal = ", ".join(map(str, sorted({degrees[key] for degrees in ways})))
            asked = f"{key} {_spell(allowed)} of {space.source(key)} {'does' if len(allowed) == 1 else 'do'}"
            raise NoFeasiblePlan(f"{asked} not divide the {devices} devices of {cluster}; {key} can be {legal}")
    if not any(all(not space.forbids(key, n) for key, n in degrees.items()) for degrees in ways):
        fixed = {key: getattr(space, key) for key in _DEGREES if getattr(space, key) is not None}
        asked = " x ".join(f"{key} {_spell(allowed)}" for key, allowed in fixed.items())
        sources = " and ".join(dict.fromkeys(map(space.source, fixed)))
        exactly = "is" if len(fixed) == len(_DEGREES) else "divides"
        raise NoFeasiblePlan(f"no product {asked} of {sources} {exactly} the {devices} devices of {cluster}")


def _spell(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"({', '.join(map(str, values))})"


def candidates(
    analysis: Analysis, cluster: Cluster, training: Training, space: SearchSpace
) -> tuple[list[Candidate], list[Rejected]]:
    """Every candidate of the space, and every factorisation that is none, with the reason."""
    found, rejected = ways(analysis, cluster, training, space)
    return [c for degrees in found for c in variants(analysis, cluster, training, space, degrees)], rejected


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
    for axis in ("mp", "ep"):
        if degrees.get(axis, 1) > 1 and axis not in analysis.axes:
            return f"no pattern that matched shards anything along {axis}"
    if degrees.get("ep", 1) > 1 and space.forbids("sharding_stage", 0):
        return f"{space.forbids('sharding_stage', 0)}, and experts are divided without ZeRO"
    if degrees.get("ep", 1) not in (1, degrees["dp"]):
        return (
            f"ep {degrees['ep']} is neither 1 nor dp {degrees['dp']}: experts are divided over all ranks of dp, or not at all"
        )
    return analysis.indivisible({axis: n for axis, n in degrees.items() if axis != "pp"})


def variants(
    analysis: Analysis, cluster: Cluster, training: Training, space: SearchSpace, degrees: Degrees
) -> Iterator[Candidate]:
    """The candidates of one factorisation, by growing micro batch."""
    pp, dp, mp = degrees.pp, degrees.dp, degrees.mp
    train = training.mode == "train"
    per_replica = training.global_batch // dp
    orders = _values(space, "order") if dp > 1 and mp > 1 else _DEFAULT["order"]
    recomputes = _values(space, "recompute") if train else ("none",)
    sequence_parallel = [sp for sp in _values(space, "sequence_parallel") if not sp or mp > 1]
    choices = [
        (order.split("_"), recompute, zero, sp)
        for order, recompute in product(orders, recomputes)
        for zero in _zero(space, cluster, degrees, order, train)
        for sp in sequence_parallel
    ]
    for micro_batch in _micro_batches(space, per_replica):
        steps = per_replica // micro_batch
        if space.forbids("accumulate_steps", steps):
            continue
        for schedule, vpp in _schedules(space, pp, steps, analysis.layers.count):
            for axes, recompute, (zero, ranks), sp in choices:
                yield Candidate(
                    pp, dp, mp, micro_batch, steps, tuple(axes), recompute, zero, sp, schedule, vpp, ranks, degrees.ep
                )


def _zero(
    space: SearchSpace, cluster: Cluster, degrees: Degrees, order: str, train: bool
) -> Iterator[tuple[int, int | Literal["whole"]]]:
    """ZeRO stages, each with the ranks that it splits states over."""
    dp, stride = degrees.dp, degrees.mp if order == "dp_mp" else 1
    machine = min(group.devices_per_machine for group in cluster.groups)
    in_machine = [n for n in range(2, dp) if dp % n == 0 and machine % (n * stride) == 0]
    for stage in _values(space, "sharding_stage"):
        if stage == 0:
            yield 0, "whole"
        if stage == 0 or dp == 1 or degrees.ep > 1 or not train:
            continue
        if not space.forbids("sharding_degree", "whole") or not space.forbids("sharding_degree", dp):
            yield stage, "whole"
        if space.sharding_degree is None:
            parts = in_machine[-1:] if stage > 1 and dp * stride > machine else []
        else:
            parts = [n for n in space.sharding_degree if isinstance(n, int) and n < dp and dp % n == 0]
        for n in parts:
            yield stage, n


def _micro_batches(space: SearchSpace, per_replica: int) -> list[int]:
    divisors = [m for m in range(1, per_replica + 1) if per_replica % m == 0]
    if space.micro_batch is not None:
        return [m for m in divisors if m in space.micro_batch]
    if space.accumulate_steps is not None:
        return divisors
    return [m for m in divisors if m <= MAX_MICRO_BATCH]


def _schedules(space: SearchSpace, pp: int, steps: int, layers: int) -> Iterator[tuple[Any, int]]:
    if pp == 1:
        yield "1F1B", 1
        return
    for schedule in _values(space, "schedule"):
        if schedule != "VPP":
            if not space.forbids("vpp", 1) or "VPP" not in _values(space, "schedule"):
                yield schedule, 1
        elif steps % pp == 0:
            for vpp in range(2, layers // pp + 1):
                if layers % (pp * vpp) == 0 and not space.forbids("vpp", vpp):
                    yield schedule, vpp


def _values(space: SearchSpace, key: str) -> Sequence[Any]:
    allowed = getattr(space, key)
    return allowed if allowed is not None else _DEFAULT.get(key) or _ALL[key]


def candidate_dict(candidate: Candidate) -> dict[str, Any]:
    """A candidate as plain JSON values."""
    return {f.name: getattr(candidate, f.name) for f in fields(candidate)} | {"axes": list(candidate.axes)}
