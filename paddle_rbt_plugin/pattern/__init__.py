"""How a pattern is written, its shard specs, and the matcher that finds it in a graph."""

from paddle_rbt_plugin.pattern.attention import BIASES, FUSED_CORES, HEAD_OPS, SCORE_OPS, attention_core, projected_heads
from paddle_rbt_plugin.pattern.builder import Builder, TensorNode
from paddle_rbt_plugin.pattern.match import DroppedMatch, Match, MatchResult, match_all, resolve
from paddle_rbt_plugin.pattern.pattern import CompiledPattern, Occurrence, Pattern, compile_pattern
from paddle_rbt_plugin.pattern.spec import ExpandedSpec, Spec, dims_mapping, expand

__all__ = [
    "BIASES",
    "FUSED_CORES",
    "HEAD_OPS",
    "SCORE_OPS",
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
    "attention_core",
    "compile_pattern",
    "dims_mapping",
    "expand",
    "match_all",
    "projected_heads",
    "resolve",
]
