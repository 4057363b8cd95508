"""Canonical names of custom ops: an op that a plugin declares to compute what one of Paddle's does is read as that one.

Patterns then match it, and completion and cost take it for the op it stands for: operand n of the custom op is tensor n of
the canonical one, and attributes go by name, those that the custom op lacks having the values that the plugin gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from paddle_rbt_plugin.errors import PatternError, UnsupportedProgram
from paddle_rbt_plugin.graph.cpp_signatures import Argument, known_ops, signature
from paddle_rbt_plugin.graph.graph import Graph, Op


@dataclass(frozen=True)
class CanonicalName:
    """What a custom op is read as: one of Paddle's ops, with values for the attributes that the custom op lacks."""

    type: str
    attrs: Mapping[str, Any]


def canonical_name(name: Any, canonical: Any, attrs: Mapping[str, Any]) -> CanonicalName:
    """A checked name. Raises PatternError for one that Paddle's own ops have, for a canonical op that the installed Paddle
    lacks, and for attributes that it has not."""
    if not isinstance(name, str) or not name:
        raise PatternError(f"an op's name is a string, such as 'my_silu', not {name!r}")
    if name.removesuffix("_") in known_ops():
        raise PatternError(f"the name {name!r} is already taken by an op of Paddle; only a custom op can be read as another")
    arguments = signature(canonical) if isinstance(canonical, str) else None
    if arguments is None:
        near = get_close_matches(str(canonical), known_ops(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PatternError(f"op {name!r} cannot be read as {canonical!r}, which is no op of the installed Paddle{hint}")
    known = [a.name for a in arguments if a.kind != "tensor"]
    unknown = sorted(set(attrs) - set(known))
    if unknown:
        raise PatternError(f"{canonical!r} has no attribute {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    return CanonicalName(canonical, dict(attrs))


def with_canonical_names(graph: Graph, names: Mapping[str, CanonicalName]) -> Graph:
    """The graph with every op named in ``names`` read as the op it stands for.

    Raises UnsupportedProgram where such an op has more operands than that one takes, or lacks an attribute."""
    if not any(op.type in names for op in graph.ops):
        return graph
    ops = tuple(read_as(op, names[op.type]) if op.type in names else op for op in graph.ops)
    return graph.rewritten(graph.tensors, ops, graph.loss)


def read_as(op: Op, name: CanonicalName) -> Op:
    """The op that a custom op stands for, with its operands. Raises UnsupportedProgram as ``with_canonical_names`` does."""
    arguments = signature(name.type)
    assert arguments is not None, "checked when the name was registered"
    slots = [a.name for a in arguments if a.kind == "tensor"]
    if len(op.inputs) > len(slots):
        raise UnsupportedProgram(
            f"{op.name} is to be read as {name.type!r}, which takes {len(slots)} tensors, but it has {len(op.inputs)} operands"
        )
    inputs = dict(zip(slots, op.inputs.values(), strict=False))
    return replace(op, type=name.type, inputs=inputs, attrs=_attrs(op, name, arguments))


def _attrs(op: Op, name: CanonicalName, arguments: tuple[Argument, ...]) -> dict[str, Any]:
    values = {**name.attrs, **op.attrs}
    wanted = [a.name for a in arguments if a.kind != "tensor" and "Place" not in a.type]
    missing = [key for key in wanted if key not in values]
    if missing:
        raise UnsupportedProgram(
            f"{op.name} is to be read as {name.type!r}, but has no attribute {missing[0]!r}; its plugin must give it a value: "
            f"register({op.type!r}, {name.type!r}, {missing[0]}=...)"
        )
    return {key: values[key] for key in wanted}
