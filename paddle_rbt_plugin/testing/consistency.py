"""Are the shardings that a pattern asks for consistent?"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from math import prod
from typing import Any

from paddle_rbt_plugin.cluster import ProcessMesh
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.graph.graph import Graph
from paddle_rbt_plugin.pattern.match import Match
from paddle_rbt_plugin.pattern.report import MatchReport, match_report
from paddle_rbt_plugin.pattern.spec import SHARD_AXES
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import Analysis, analyse
from paddle_rbt_plugin.testing.matching import AnyPattern, compiled_pattern, graph_of

DEGREES: Mapping[str, int] = {"dp": 2, "mp": 2}


def assert_consistent(pattern: AnyPattern, model: Any, input_spec: Sequence[Any] | None = None, **how: Any) -> None:
    """Asserts that nothing speaks against the shardings of ``pattern``; ``how``, and what is a TunerError, as in
    ``inconsistencies``."""
    problems = inconsistencies(pattern, model, input_spec, **how)
    assert not problems, "\n".join(["the shardings of the pattern are not consistent:", *(f"- {p}" for p in problems)])


def inconsistencies(
    pattern: AnyPattern,
    model: Any,
    input_spec: Sequence[Any] | None = None,
    *,
    degrees: Mapping[str, int] = DEGREES,
    displaces: Collection[str] = (),
    whole: Collection[str] = (),
    loss: Any = None,
    labels_spec: Sequence[Any] = (),
) -> tuple[str, ...]:
    """What speaks against the shardings that ``pattern`` asks for in ``model``, a sentence each; empty where nothing does.

    - It matches, and every match stands: none conflicts with another pattern's or reaches across layers.
    - No match of another pattern gives way to it, but for those that it ``displaces`` on purpose, by name.
    - It claims every parameter that its ops read, but for those it leaves to others (``whole``, by their name in the model).
    - The ``degrees`` divide every dimension that it shards, and all it asks for survives Paddle's completion on that mesh.

    Raises TunerError for degrees that are no mesh, and for names that no pattern and no parameter has."""
    _check_degrees(degrees)
    plugins = load_plugins()
    compiled = compiled_pattern(pattern, plugins)
    graph = graph_of(model, input_spec, loss, labels_spec)
    _check_names("displaces", displaces, {p.name for p in plugins.patterns}, "pattern")
    named = {name for t in graph.tensors if t.kind == "param" for name in (t.name, t.structured_name) if name}
    _check_names("whole", whole, named, "parameter of the model")
    report = match_report(graph, compiled, plugins.patterns, plugins.op_names)
    if not report.matches:
        return (str(report),)
    others = [p for p in plugins.patterns if p.name != compiled.name]
    analysis = analyse(graph, [compiled, *others], op_names=plugins.op_names)
    return (*_conflicts(report, displaces), *_unclaimed(report, whole), *_misfits(report, analysis, degrees))


def _check_degrees(degrees: Any) -> None:
    right = "degrees are whole numbers of at least 1 by axis, such as {'dp': 2, 'mp': 2}"
    if not isinstance(degrees, Mapping) or not degrees:
        raise TunerError(f"{right}, not {degrees!r}")
    for axis, degree in degrees.items():
        if axis not in SHARD_AXES:
            raise TunerError(f"degrees: unknown axis {axis!r}; patterns shard along {', '.join(SHARD_AXES)}")
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise TunerError(f"{right}; {axis} cannot be {degree!r}")


def _check_names(argument: str, names: Any, known: Collection[str], what: str) -> None:
    if isinstance(names, str) or not isinstance(names, Collection):
        raise TunerError(f"{argument} is a set of names, not {names!r}")
    for name in names:
        if name not in known:
            near = get_close_matches(str(name), sorted(known), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TunerError(f"{argument}: no {what} is named {name!r}{hint}")


def _conflicts(report: MatchReport, displaces: Collection[str]) -> Iterator[str]:
    yield from dict.fromkeys(f"a match is dropped: {d.reason}" for d in report.dropped)
    displaced = (d for d in report.displaced if d.match.pattern not in displaces)
    yield from dict.fromkeys(f"a match of {d.match.pattern} gives way to it, which {d.reason}" for d in displaced)
    if report.pattern.name in report.result.incomplete:
        yield "its search was cut off, so matches may be missing"


def _unclaimed(report: MatchReport, whole: Collection[str]) -> Iterator[str]:
    claims = report.result.claims
    for match in report.matches:
        for tensor, reader in _parameters(report.graph, match).items():
            t = report.graph.tensors[tensor]
            if tensor not in claims and not {t.name, t.structured_name} & set(whole):
                yield f"{t.structured_name or t.name} {list(t.shape)}, which {reader} reads, is claimed by no pattern"


def _parameters(graph: Graph, match: Match) -> dict[int, str]:
    """The parameters that the ops of a match read, with one that reads each."""
    return {t: graph.ops[op].name for op in match.ops for t in graph.ops[op].operands if graph.tensors[t].kind == "param"}


def _misfits(report: MatchReport, analysis: Analysis, degrees: Mapping[str, int]) -> Iterator[str]:
    own = replace(analysis, matches=replace(analysis.matches, matches=report.matches))
    indivisible = own.indivisible(degrees)
    if indivisible:
        yield str(indivisible)
        return
    axes = tuple(degrees)
    mesh = ProcessMesh(axes, tuple(degrees.values()), tuple(range(prod(degrees.values()))))
    lost = own.lost_sharding(analysis.complete(mesh))
    if lost:
        yield str(lost)
