"""How one pattern fares on a model, for its author: where it matches, what does not stand, or why nothing matches."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paddle_rbt_plugin.graph.graph import Graph, Tensor
from paddle_rbt_plugin.graph.names import CanonicalName, with_canonical_names
from paddle_rbt_plugin.graph.rewrite import rewrite_graph
from paddle_rbt_plugin.layers import cluster_layers
from paddle_rbt_plugin.layers.layers import Layers
from paddle_rbt_plugin.pattern.match import DroppedMatch, Match, MatchResult, match_all
from paddle_rbt_plugin.pattern.near_miss import NearMiss, near_miss
from paddle_rbt_plugin.pattern.pattern import CompiledPattern, Pattern, compile_pattern
from paddle_rbt_plugin.pattern.spec import spell
from paddle_rbt_plugin.pattern.vocabulary import spell_unknown, unknown_ops

_SHOWN = 3
"""Matches that are shown tensor by tensor."""


@dataclass(frozen=True)
class MatchReport:
    """One pattern on one model, among other patterns."""

    pattern: CompiledPattern
    graph: Graph
    """As it is matched: custom ops under their canonical names, badly sharded ops rewritten."""
    layers: Layers
    result: MatchResult
    """Of all patterns together."""
    unknown: tuple[str, ...]
    """Ops that the pattern cannot do without and that Paddle has not."""
    near_miss: NearMiss | None
    """Where the pattern occurs nowhere: how far it comes."""

    @property
    def matches(self) -> tuple[Match, ...]:
        """The matches that stand, in program order."""
        return tuple(m for m in self.result.matches if m.pattern == self.pattern.name)

    @property
    def count(self) -> int:
        return len(self.matches)

    @property
    def dropped(self) -> tuple[DroppedMatch, ...]:
        """Its matches that do not stand, with the reasons."""
        return tuple(d for d in self.result.dropped if d.match.pattern == self.pattern.name)

    @property
    def displaced(self) -> tuple[DroppedMatch, ...]:
        """Matches of other patterns that give way to it."""
        winners = (d for d in self.result.dropped if d.winner is not None and d.winner.pattern == self.pattern.name)
        return tuple(d for d in winners if d.match.pattern != self.pattern.name)

    @property
    def tensors(self) -> tuple[dict[str, Tensor], ...]:
        """Per match the tensors of the model by the names that the pattern gives them."""
        return tuple({name: self.graph.tensors[t] for name, t in m.tensors.items()} for m in self.matches)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        name = self.pattern.name
        return {
            "pattern": name,
            "distribution": self.pattern.distribution,
            "version": self.pattern.version,
            "matches": [{key: t.structured_name or t.name for key, t in found.items()} for found in self.tensors],
            "dropped": [d.reason for d in self.dropped],
            "raised": self.result.failed.get(name),
            "incomplete": name in self.result.incomplete,
            "unknown_ops": list(self.unknown),
            "near_miss": None if self.near_miss is None else asdict(self.near_miss),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        name = self.pattern.name
        if name in self.result.failed:
            yield f"{name} is left out: its own code raised {self.result.failed[name]}"
            return
        yield f"{name} matches {self.count} time{'s' if self.count != 1 else ''}"
        for match, tensors in zip(self.matches[:_SHOWN], self.tensors, strict=False):
            specs = {key: match.specs.get(t.index) for key, t in tensors.items()}
            claimed = (f"{key} = {tensors[key].structured_name or tensors[key].name} {_spell(s)}" for key, s in specs.items())
            yield f"  {', '.join(claimed)}"
        if self.count > _SHOWN:
            yield f"  and {self.count - _SHOWN} more"
        for reason, count in _counted(d.reason for d in self.dropped).items():
            yield f"dropped{f' {count} times' if count > 1 else ''}: {reason}"
        if name in self.result.incomplete:
            yield "its search was cut off: there are too many ways to lay it over the model, so draw it more narrowly"
        if self.unknown:
            yield spell_unknown(self.unknown)
        if self.near_miss is not None:
            yield str(self.near_miss)
        elif not self.matches and not self.dropped and name not in self.result.incomplete:
            yield "it occurs, but its shard() declines every place"


def match_report(
    graph: Graph,
    pattern: CompiledPattern | type[Pattern],
    others: Iterable[CompiledPattern] = (),
    op_names: Mapping[str, CanonicalName] | None = None,
) -> MatchReport:
    """Matches ``pattern`` among ``others`` as planning does, and says what came of it. Raises PatternError for a pattern class
    that is malformed."""
    compiled = pattern if isinstance(pattern, CompiledPattern) else compile_pattern(pattern)
    graph, _ = rewrite_graph(with_canonical_names(graph, op_names or {}))
    layers = cluster_layers(graph)
    among = [p for p in others if p.name != compiled.name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the report says so
        result = match_all(graph, [compiled, *among], layers)
    found = any(m.pattern == compiled.name for m in (*result.matches, *(d.match for d in result.dropped)))
    explained = found or compiled.name in result.failed
    miss = None if explained else near_miss(graph, compiled)
    return MatchReport(compiled, graph, layers, result, unknown_ops(compiled, op_names or ()), miss)


def _spell(spec: Any) -> str:
    return "" if spec is None else spell(spec)


def _counted(reasons: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for reason in reasons:
        counts[reason] = counts.get(reason, 0) + 1
    return counts
