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
- Experts of a mixture stay whole on every rank (ep 1) or are divided over all ranks of dp (ep = dp, as in GShard, arXiv
  2006.16668): a tensor dimension lies along one mesh axis, so dp cannot be split into an ep and the rest. ZeRO would split the
  experts' states over the very ranks that hold different experts, so it is not combined with ep.
- An interleaved schedule cuts evenly (pp * vpp divides the layers) and takes groups of pp micro batches, as Paddle's does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Any, Literal

from paddle_rbt_plugin.cluster import Cluster, factorisations
from paddle_rbt_plugin.cost.candidate import Candidate, Training
from paddle_rbt_plugin.errors import NoFeasiblePlan
from paddle_rbt_plugin.search.analysis import Analysis
from paddle_rbt_plugin.search.diagnosis import check_met, interleaving, why_none
from paddle_rbt_plugin.search.dimensions import ALL, DEGREES, SearchSpace, divisors
from paddle_rbt_plugin.search.rejections import Reason, Rejected, reason
from paddle_rbt_plugin.spelling import counted

_DEFAULT = {"schedule": ("1F1B", "VPP"), "order": ("dp_mp",)}
"""The values searched where the user says nothing, for the dimensions in which that is not all of them."""


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
        why = _rules_out(analysis, training, space, degrees.to_dict())
        if why is None and next(variants(analysis, cluster, training, space, degrees), None) is None:
            why = why_none(space, partial(variants, analysis, cluster, training, degrees=degrees))
        if why is not None:
            rejected.append(Rejected(degrees.to_dict(), why))
        else:
            found.append(degrees)
    if found:
        check_met(space, partial(_every_candidate, analysis, cluster, training), training.mode == "train")
    asked = interleaving(space)
    if asked:  # some way has it, so those that cannot are not what the user wants
        rejected += [Rejected(d.to_dict(), reason("interleaving", asked=asked)) for d in found if d.pp == 1]
        found = [d for d in found if d.pp > 1]
    return found, rejected


def _every_candidate(analysis: Analysis, cluster: Cluster, training: Training, space: SearchSpace) -> Iterator[Candidate]:
    for degrees in _all_degrees(analysis, cluster, space):
        if _rules_out(analysis, training, space, degrees.to_dict()) is None:
            yield from variants(analysis, cluster, training, space, degrees)


def _all_degrees(analysis: Analysis, cluster: Cluster, space: SearchSpace) -> Iterator[Degrees]:
    for pp, dp, mp in factorisations(cluster.device_count):
        chosen = space.ep or ((1, dp) if "ep" in analysis.axes else (1,))
        yield from (Degrees(pp, dp, mp, ep) for ep in dict.fromkeys(chosen))


def _check_degrees(space: SearchSpace, cluster: Cluster) -> None:
    devices = cluster.device_count
    ways = [dict(zip(DEGREES, degrees, strict=True)) for degrees in factorisations(devices)]
    for key in DEGREES:
        allowed = getattr(space, key)
        if allowed is not None and not any(devices % n == 0 for n in allowed):
            legal = ", ".join(map(str, sorted({degrees[key] for degrees in ways})))
            asked = f"{key} {_spell(allowed)} of {space.source(key)} {'does' if len(allowed) == 1 else 'do'}"
            raise NoFeasiblePlan(f"{asked} not divide the {counted(devices, 'device')} of {cluster}; {key} can be {legal}")
    if not any(all(not space.forbids(key, n) for key, n in degrees.items()) for degrees in ways):
        fixed = {key: getattr(space, key) for key in DEGREES if getattr(space, key) is not None}
        asked = " x ".join(f"{key} {_spell(allowed)}" for key, allowed in fixed.items())
        sources = " and ".join(dict.fromkeys(map(space.source, fixed)))
        exactly = "is" if len(fixed) == len(DEGREES) else "divides"
        raise NoFeasiblePlan(f"no product {asked} of {sources} {exactly} the {counted(devices, 'device')} of {cluster}")


def _spell(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"({', '.join(map(str, values))})"


def candidates(
    analysis: Analysis, cluster: Cluster, training: Training, space: SearchSpace
) -> tuple[list[Candidate], list[Rejected]]:
    """Every candidate of the space, and every factorisation that is none, with the reason."""
    found, rejected = ways(analysis, cluster, training, space)
    return [c for degrees in found for c in variants(analysis, cluster, training, space, degrees)], rejected


def _rules_out(analysis: Analysis, training: Training, space: SearchSpace, degrees: Mapping[str, int]) -> Reason | None:
    for key, value in degrees.items():
        if space.forbids(key, value):
            return reason("space", source=space.source(key), key=key, allowed=getattr(space, key))
    dp, ep, layers = degrees["dp"], degrees.get("ep", 1), analysis.layers.count
    if not analysis.matches.matches and dp < degrees["pp"] * dp * degrees["mp"]:
        return reason("patterns")
    if degrees["pp"] > layers:
        return reason("layers", pp=degrees["pp"], layers=layers)
    if training.global_batch % dp:
        return reason("batch", dp=dp, batch=training.global_batch, legal="", what="global batch")
    if ep > 1 and training.mode == "train" and space.forbids("sharding_stage", 0):
        return reason("experts_zero", source=space.source("sharding_stage"), allowed=space.sharding_stage)
    if ep not in (1, dp):
        return reason("experts", ep=ep, dp=dp)
    asked = [axis for axis in ("mp", "ep") if getattr(space, axis) is not None]
    if why := analysis.under({axis: n for axis, n in degrees.items() if axis != "pp"}).without_axis(degrees, asked):
        return why
    return analysis.indivisible_batch(dp)


@dataclass(frozen=True)
class Family:
    """Candidates that differ in their micro batches only. ``candidate`` is that of the first of them."""

    candidate: Candidate
    micro_batches: tuple[int, ...]
    """Growing."""
    steps: tuple[int, ...]
    """How many of each a step accumulates."""

    def member(self, index: int) -> Candidate:
        """The candidate with one of the micro batches."""
        return replace(self.candidate, micro_batch=self.micro_batches[index], accumulate_steps=self.steps[index])


def families(
    analysis: Analysis, cluster: Cluster, training: Training, space: SearchSpace, degrees: Degrees
) -> Iterator[Family]:
    """The candidates of one factorisation, by schedule."""
    pp, dp, mp = degrees.pp, degrees.dp, degrees.mp
    train = training.mode == "train"
    per_replica = training.global_batch // dp
    orders = _values(space, "order") if dp > 1 and mp > 1 else _DEFAULT["order"]
    recomputes = _values(space, "recompute") if train else ("none",)
    sequence_parallel = [sp for sp in _values(space, "sequence_parallel") if not sp or mp > 1]
    choices = [
        (tuple(order.split("_")), recompute, zero, sp)
        for order, recompute in product(orders, recomputes)
        for zero in _zero(space, cluster, degrees, order, train)
        for sp in sequence_parallel
    ]
    whole = [(m, per_replica // m) for m in _micro_batches(space, per_replica)]
    whole = [(m, steps) for m, steps in whole if not space.forbids("accumulate_steps", steps)]
    for schedule, vpp in _schedules(space, pp, analysis.layers.count):
        legal = [(m, steps) for m, steps in whole if schedule != "VPP" or steps % pp == 0]
        if not legal:
            continue
        micro_batches, steps = zip(*legal, strict=True)
        for axes, recompute, (zero, ranks), sp in choices:
            first = Candidate(pp, dp, mp, *legal[0], axes, recompute, zero, sp, schedule, vpp, ranks, degrees.ep)
            yield Family(first, micro_batches, steps)


def variants(
    analysis: Analysis, cluster: Cluster, training: Training, space: SearchSpace, degrees: Degrees
) -> Iterator[Candidate]:
    """The candidates of one factorisation, by growing micro batch."""
    found = list(families(analysis, cluster, training, space, degrees))
    for micro_batch in sorted({m for family in found for m in family.micro_batches}):
        for family in found:
            if micro_batch in family.micro_batches:
                yield family.member(family.micro_batches.index(micro_batch))


def _zero(
    space: SearchSpace, cluster: Cluster, degrees: Degrees, order: str, train: bool
) -> Iterator[tuple[int, int | Literal["whole"]]]:
    """ZeRO stages, each with the ranks that it splits states over."""
    dp, stride = degrees.dp, degrees.mp if order == "dp_mp" else 1
    machine = min(group.devices_per_machine for group in cluster.groups)
    in_machine = [n for n in range(2, dp) if dp % n == 0 and machine % (n * stride) == 0]
    for stage in _values(space, "sharding_stage") if train else (0,):
        if stage == 0:
            yield 0, "whole"
        if stage == 0 or dp == 1 or degrees.ep > 1:
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
    return [m for m in divisors(per_replica) if space.micro_batch is None or m in space.micro_batch]


def _schedules(space: SearchSpace, pp: int, layers: int) -> Iterator[tuple[Any, int]]:
    if pp == 1:
        yield "1F1B", 1
        return
    for schedule in _values(space, "schedule"):
        if schedule != "VPP":
            if not space.forbids("vpp", 1) or "VPP" not in _values(space, "schedule"):
                yield schedule, 1
        else:
            yield from (
                (schedule, vpp)
                for vpp in range(2, layers // pp + 1)
                if layers % (pp * vpp) == 0 and not space.forbids("vpp", vpp)
            )


def _values(space: SearchSpace, key: str) -> Sequence[Any]:
    allowed = getattr(space, key)
    return allowed if allowed is not None else _DEFAULT.get(key) or ALL[key]


def candidate_dict(candidate: Candidate) -> dict[str, Any]:
    """A candidate as plain JSON values."""
    return {f.name: getattr(candidate, f.name) for f in fields(candidate)} | {"axes": list(candidate.axes)}


def order_of(candidate: Candidate) -> tuple[str, ...]:
    """Candidates in an order of their own: smaller degrees first."""
    return tuple(f"{value:>6}" if isinstance(value, int) else str(value) for value in candidate_dict(candidate).values())
