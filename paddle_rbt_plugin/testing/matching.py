"""Does a pattern match a model, how often, and with which tensors?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.graph import Graph, read_program
from paddle_rbt_plugin.handover.pir.static_shapes import with_static_shapes
from paddle_rbt_plugin.pattern import CompiledPattern, Pattern, compile_pattern
from paddle_rbt_plugin.pattern.report import MatchReport, match_report
from paddle_rbt_plugin.plugins import Plugins, load_plugins

AnyPattern = type[Pattern] | CompiledPattern | str

BATCH = 8
"""Samples on which a MODEL that is given by name is traced."""


def match_pattern(
    pattern: AnyPattern,
    model: Any,
    input_spec: Sequence[Any] | None = None,
    *,
    loss: Any = None,
    labels_spec: Sequence[Any] = (),
    alone: bool = False,
) -> MatchReport:
    """How ``pattern`` fares on ``model``: its matches, what does not stand and why, or how far it fits at best.

    It is matched among all installed patterns, as in planning, or ``alone``. ``print(report)`` says all of it, also as
    the message of an assertion: ``assert report.count == 12, report``. Raises PatternError for a malformed pattern, TunerError
    for what is no model."""
    plugins = load_plugins()
    others = () if alone else plugins.patterns
    graph = graph_of(model, input_spec, loss, labels_spec)
    return match_report(graph, compiled_pattern(pattern, plugins), others, plugins.op_names)


def assert_matches(
    pattern: AnyPattern, model: Any, input_spec: Sequence[Any] | None = None, *, count: int, **how: Any
) -> MatchReport:
    """Asserts that ``pattern`` matches ``count`` times; 0 is for look-alikes. ``how`` as in ``match_pattern``."""
    report = match_pattern(pattern, model, input_spec, **how)
    assert report.count == count, f"expected {count} matches\n{report}"
    return report


def compiled_pattern(pattern: AnyPattern, plugins: Plugins) -> CompiledPattern:
    """The pattern ready to match. Raises PatternError for an unknown name and for a malformed class."""
    if isinstance(pattern, str):
        return plugins.pattern(pattern)
    return pattern if isinstance(pattern, CompiledPattern) else compile_pattern(pattern)


def graph_of(model: Any, input_spec: Sequence[Any] | None = None, loss: Any = None, labels_spec: Sequence[Any] = ()) -> Graph:
    """The forward graph of a model. Raises TunerError for what is none."""
    from paddle import nn

    if isinstance(model, Graph):
        return model
    if isinstance(model, str):
        from paddle_rbt_plugin.model_reference import model_graph

        return model_graph(model, BATCH)
    if isinstance(model, nn.Layer):
        from paddle_rbt_plugin.handover.pir.trace import trace_layer

        if not input_spec:
            raise TunerError(
                "tracing a Layer needs the shapes of its inputs: give input_spec=[paddle.static.InputSpec(...), ...]"
            )
        return trace_layer(model, input_spec, loss, labels_spec).graph
    if hasattr(model, "global_block"):
        return read_program(*with_static_shapes(model, loss))
    raise TunerError(
        f"only a Layer, a static Program, a Graph or the name of a model can be matched, not {type(model).__name__}"
    )
