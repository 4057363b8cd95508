"""How a pattern is written, its shard specs, and the matcher that finds it in a graph."""

from paddle_rbt_plugin.pattern.builder import Builder, TensorNode
from paddle_rbt_plugin.pattern.match import DroppedMatch, Match, MatchResult, match_all
from paddle_rbt_plugin.pattern.pattern import CompiledPattern, Occurrence, Pattern, compile_pattern
from paddle_rbt_plugin.pattern.spec import ExpandedSpec, Spec, dims_mapping, expand

__all__ = [
    "Builder",
    "CompiledPattern",
    "DroppedMatch",
    "ExpandedSpec",
    "Match",
    "MatchResult",
    "Occurrence",
    "Pattern",
    "Spec",
    "TensorNode",
    "compile_pattern",
    "dims_mapping",
    "expand",
    "match_all",
]
