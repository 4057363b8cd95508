"""All matches of all patterns in a graph, and which of them stand.

A match *claims* each tensor that its specs name. Claims of two matches on one tensor agree when their specs, expanded to the
tensor's rank, are equal; where they differ, one match gives way as a whole: the one of lower priority, then the one with
fewer sharded tensors, then the later one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paddle_rbt_plugin.errors import PatternError, describe_error
from paddle_rbt_plugin.graph.graph import Graph
from paddle_rbt_plugin.layers.layers import Layers
from paddle_rbt_plugin.pattern.adapters import Adapter, find_adapters, without_adapters
from paddle_rbt_plugin.pattern.builder import PatternGraph
from paddle_rbt_plugin.pattern.matcher import Assignment, Budget, GraphIndex, SearchBudgetExceeded, occurrences
from paddle_rbt_plugin.pattern.pattern import CompiledPattern, Occurrence, Pattern, compile_pattern
from paddle_rbt_plugin.pattern.spec import ExpandedSpec, expand, spell

MAX_STEPS = 2_000_000
"""Candidates that the search for one pattern may try: some seconds. A GPT of a hundred layers needs a hundredth of it."""


@dataclass(frozen=True)
class Match:
    """One place where a pattern occurs, with the shardings it asks for."""

    pattern: str
    distribution: str
    version: str
    tensors: Mapping[str, int]
    """Named pattern tensor -> position in the graph; optional tensors only where present."""
    ops: tuple[int, ...]
    """Positions of the matched ops in ascending order, those that chains run through included."""
    specs: Mapping[int, ExpandedSpec]
    """Position of each claimed tensor -> one axis or None per dimension."""
    priority: int = 0
    dim_names: Mapping[int, tuple[str | None, ...]] = field(default_factory=dict)

    @property
    def sharded(self) -> int:
        """Number of tensors with at least one sharded dimension."""
        return sum(any(spec) for spec in self.specs.values())

    def dim_name(self, tensor: int, dim: int) -> str:
        """What a dimension of a graph tensor is in the words of the pattern: "attention heads", or "dim 0 of x"."""
        name = self.dim_names[tensor][dim] if tensor in self.dim_names else None
        if name:
            return name
        node = next((n for n, t in self.tensors.items() if t == tensor), f"tensor {tensor}")
        return f"dim {dim} of {node}"


@dataclass(frozen=True)
class DroppedMatch:
    """A match that does not stand."""

    match: Match
    reason: str
    winner: Match | None = None
    """The match that it gave way to, where it lost a conflict."""


@dataclass(frozen=True)
class MatchResult:
    """What ``match_all`` found, in program order."""

    matches: tuple[Match, ...]
    dropped: tuple[DroppedMatch, ...]
    failed: Mapping[str, str]
    """Patterns left out because their own code raised, each with the exception and the package it came from."""
    incomplete: tuple[str, ...]
    """Patterns whose search was cut short by its budget: matches of theirs may be missing."""

    @property
    def claims(self) -> dict[int, tuple[ExpandedSpec, Match]]:
        """Every claimed tensor with its spec and the (first) match that claims it."""
        claims: dict[int, tuple[ExpandedSpec, Match]] = {}
        for match in self.matches:
            for tensor, spec in match.specs.items():
                claims.setdefault(tensor, (spec, match))
        return claims


def match_all(
    graph: Graph,
    patterns: Iterable[CompiledPattern | type[Pattern]],
    layers: Layers | None = None,
    max_steps: int = MAX_STEPS,
) -> MatchResult:
    """All matches of ``patterns`` in ``graph`` that stand together, with those that do not and why.

    With ``layers``, a match may not reach from one layer into another unless its pattern says that it ``spans_layers``.
    A pattern whose predicates or ``shard`` raise is left out, and one whose search exceeds ``max_steps`` may be incomplete;
    both are warned about and listed. Raises PatternError for a pattern class that is malformed.
    """
    adapters = find_adapters(graph)
    index = GraphIndex(without_adapters(graph, adapters))
    layer_of = layers.layer_of() if layers is not None else {}
    found: list[Match] = []
    dropped: list[DroppedMatch] = []
    failed: dict[str, str] = {}
    incomplete: list[str] = []
    for pattern in patterns:
        compiled = pattern if isinstance(pattern, CompiledPattern) else compile_pattern(pattern)
        source = f" ({compiled.source})" if compiled.source else ""
        try:
            matches, unfit, complete = _match_pattern(index, compiled, layer_of, max_steps)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: a plugin must not end the job
            failed[compiled.name] = reason = describe_error(error) + source
            warnings.warn(f"pattern {compiled.name!r} is left out, its own code raised {reason}", stacklevel=2)
            continue
        found += [_with_adapters(match, adapters) for match in matches]
        dropped += unfit
        if not complete:
            incomplete.append(compiled.name)
            warnings.warn(
                f"pattern {compiled.name!r}{source}: search ended after {max_steps} steps, matches may be missing", stacklevel=2
            )
    standing, lost = resolve(found, graph)
    by_place = sorted(dropped + lost, key=lambda d: _place(d.match))
    return MatchResult(tuple(standing), tuple(by_place), failed, tuple(incomplete))


def resolve(matches: Iterable[Match], graph: Graph) -> tuple[list[Match], list[DroppedMatch]]:
    """The matches whose claims agree, and those that give way to them; both in program order."""
    holders: dict[int, Match] = {}
    standing: list[Match] = []
    lost: list[DroppedMatch] = []
    for match in sorted(matches, key=lambda m: (-m.priority, -m.sharded, _place(m))):
        clash = next((t for t, spec in match.specs.items() if t in holders and holders[t].specs[t] != spec), None)
        if clash is not None:
            winner = holders[clash]
            reason = (
                f"claims {graph.tensors[clash].name} as {spell(match.specs[clash])}, "
                f"but {winner.pattern} claims it as {spell(winner.specs[clash])}"
            )
            lost.append(DroppedMatch(match, reason, winner))
            continue
        standing.append(match)
        for tensor in match.specs:
            holders.setdefault(tensor, match)
    return sorted(standing, key=_place), sorted(lost, key=lambda d: _place(d.match))


def _place(match: Match) -> tuple[tuple[int, ...], str, tuple[int, ...]]:
    return match.ops, match.pattern, tuple(match.tensors.values())


def _match_pattern(
    index: GraphIndex, compiled: CompiledPattern, layer_of: Mapping[int, int], max_steps: int
) -> tuple[list[Match], list[DroppedMatch], bool]:
    """The distinct matches of one pattern, those that do not fit, and whether the search came to its end."""
    budget = Budget(max_steps)
    unique: dict[tuple[frozenset[int], frozenset[tuple[int, ExpandedSpec]]], Match] = {}
    unfit: dict[tuple[frozenset[int], str], DroppedMatch] = {}
    complete = True
    try:
        for variant in compiled.variants:
            for assignment in occurrences(variant, index, budget):
                match, problem = _make_match(index, compiled, variant, assignment, budget)
                problem = problem or _crosses_layers(compiled, match, layer_of)
                own = frozenset(assignment.ops)
                if problem:
                    unfit.setdefault((own, problem), DroppedMatch(match, problem))
                else:
                    unique.setdefault((own, frozenset(match.specs.items())), match)
    except SearchBudgetExceeded:
        complete = False
    largest = _without_contained({key: key[0] for key in unique})
    declined = [key for key in largest if callable(compiled.pattern.shard) and not unique[key].specs]
    return [unique[key] for key in largest if key not in declined], list(unfit.values()), complete


def _make_match(
    index: GraphIndex, compiled: CompiledPattern, variant: PatternGraph, assignment: Assignment, budget: Budget
) -> tuple[Match, str]:
    """The match that an assignment stands for, and what keeps it from being one (empty if nothing does)."""
    graph = index.graph
    tensors = {name: assignment.tensors[node.index] for name, node in variant.names.items()}
    chains = (index.between(c, assignment.tensors[c.source], assignment.tensors[c.target], budget) for c in variant.chains)
    ops = tuple(sorted({*assignment.ops}.union(*chains)))
    specs: dict[int, ExpandedSpec] = {}
    dim_names: dict[int, tuple[str | None, ...]] = {}
    problem = ""
    try:
        for name, spec in compiled.specs(Occurrence(graph, tensors)).items():
            tensor = graph.tensors[tensors[name]]
            full = expand(spec, tensor.ndim, f"tensor {name!r}, which is {tensor.name},")
            if specs.setdefault(tensor.index, full) != full:
                raise PatternError(f"asks for two shardings of {tensor.name}: {spell(specs[tensor.index])} and {spell(full)}")
        for name, dims in compiled.pattern.dim_names.items():
            if name in tensors:
                tensor = graph.tensors[tensors[name]]
                dim_names.setdefault(tensor.index, expand(dims, tensor.ndim, f"dim_names of {name!r}"))
    except PatternError as error:
        problem = str(error)
    pattern = compiled.pattern
    match = Match(pattern.name, compiled.distribution, compiled.version, tensors, ops, specs, pattern.priority, dim_names)
    return match, problem


def _with_adapters(match: Match, adapters: Sequence[Adapter]) -> Match:
    """A match that also claims the adapters of the weights that it claims."""
    for adapter in adapters:
        if adapter.weight in match.specs:
            names = match.dim_names.get(adapter.weight)
            match = replace(
                match,
                specs={**match.specs, **adapter.of_weights(match.specs[adapter.weight])},
                dim_names={**match.dim_names, **(adapter.of_weights(names) if names else {})},
                ops=tuple(sorted({*match.ops, *adapter.ops})),
            )
    return match


def _crosses_layers(compiled: CompiledPattern, match: Match, layer_of: Mapping[int, int]) -> str:
    spanned = sorted({layer_of[op] for op in match.ops if op in layer_of})
    if compiled.pattern.spans_layers or len(spanned) < 2:
        return ""
    return f"reaches across layers {', '.join(map(str, spanned))}"


def _without_contained(own_ops: Mapping[tuple, frozenset[int]]) -> list[tuple]:
    """The keys whose ops are not a strict subset of another's: a match with its optional ops counts, not the one without."""
    by_op: dict[int, list[frozenset[int]]] = {}
    for ops in own_ops.values():
        for op in ops:
            by_op.setdefault(op, []).append(ops)
    return [key for key, ops in own_ops.items() if not any(ops < other for other in by_op[next(iter(ops))])]
