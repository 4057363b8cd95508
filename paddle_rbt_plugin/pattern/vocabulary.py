"""Which ops a pattern names that the installed Paddle has not."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

from paddle_rbt_plugin.graph.cpp_signatures import known_ops
from paddle_rbt_plugin.pattern.pattern import CompiledPattern


def unknown_ops(pattern: CompiledPattern, custom: Collection[str] = ()) -> tuple[str, ...]:
    """The ops without which no variant of the pattern can match, and which neither Paddle nor ``custom`` knows; empty where
    the pattern can match."""
    known = known_ops() | set(custom)
    missing = [{t for op in variant.ops if not known & op.types for t in op.types} for variant in pattern.variants]
    return tuple(sorted(set().union(*missing))) if all(missing) else ()


def spell_unknown(types: Iterable[str]) -> str:
    """That Paddle has no such ops, and what it has that is spelt like them."""
    known = known_ops()
    near = dict.fromkeys(n for t in types for n in get_close_matches(t, known, 1))
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return f"Paddle has no op named {' or '.join(map(repr, types))}{hint}"
