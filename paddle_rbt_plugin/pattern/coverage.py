"""How much of a model its patterns shard: parameter by parameter, with who decided it and where it stands.

A parameter counts as sharded when a pattern divides one of its dimensions along a model-parallel axis. What is whole is
either whole on purpose, because a pattern says so, or unmatched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from paddle_rbt_plugin.graph.graph import Graph, Tensor
from paddle_rbt_plugin.layers.layers import Layers
from paddle_rbt_plugin.pattern.match import MatchResult

Place = Literal["block", "before", "after"]
MODEL_AXES = frozenset({"mp", "ep"})


_SHOWN = 3
"""How many names are written out."""


@dataclass(frozen=True)
class Covered:
    """One parameter."""

    tensor: Tensor
    places: frozenset[Place]
    """Where it is read: in a transformer block, or before the first or after the last of them, embedding or head; a tied
    embedding is both."""
    pattern: str
    """Name of the pattern that decided; empty where none did."""
    sharded: bool


@dataclass(frozen=True)
class Coverage:
    """All parameters of a model, in program order."""

    params: tuple[Covered, ...]

    def share(self, place: Place) -> float:
        """Sharded bytes over all bytes of a place; 1 where it holds no parameters."""
        sizes = [(c.tensor.nbytes, c.sharded) for c in self.params if place in c.places]
        total = sum(n for n, _ in sizes)
        return sum(n for n, sharded in sizes if sharded) / total if total else 1.0

    def whole(self, pattern: str | None = None) -> tuple[Covered, ...]:
        """The parameters that stay whole: all of them, or those that one pattern (``""``: none) decided."""
        return tuple(c for c in self.params if not c.sharded and pattern in (None, c.pattern))

    def reasons(self) -> tuple[str, ...]:
        """What is not sharded and why, a line per pattern: ``layer_norm: 10 parameters, 2,560 bytes, whole on purpose``."""
        lines = []
        for pattern in dict.fromkeys(c.pattern for c in self.whole()):
            params = self.whole(pattern)
            size = sum(c.tensor.nbytes for c in params)
            many = f"{len(params)} parameter{'s' if len(params) > 1 else ''}, {size:,} bytes"
            if pattern:
                lines.append(f"{pattern}: {many}, whole on purpose")
            else:
                names = [c.tensor.structured_name or c.tensor.name for c in params]
                shown = [*names[:_SHOWN], *([f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else [])]
                lines.append(f"no pattern: {many} ({', '.join(shown)})")
        return tuple(lines)


def coverage(graph: Graph, layers: Layers, result: MatchResult, axes: Collection[str] = MODEL_AXES) -> Coverage:
    """What the matches of a graph shard along ``axes``."""
    places = _places(graph, layers)
    claims = result.claims
    rows = []
    for t in graph.params:
        spec, match = claims.get(t.index, ((), None))
        rows.append(Covered(t, places[t.index], match.pattern if match else "", any(axis in axes for axis in spec)))
    return Coverage(tuple(rows))


def table(rows: Iterable[tuple[str, Coverage]]) -> str:
    """The coverage of several models as a Markdown table."""
    lines = ["| model | blocks | embedding | head | not sharded |", "|---|---|---|---|---|"]
    for name, found in rows:
        shares = " | ".join(f"{found.share(place):.1%}" for place in ("block", "before", "after"))
        lines.append(f"| {name} | {shares} | {'<br>'.join(found.reasons())} |")
    return "\n".join(lines)


def _places(graph: Graph, layers: Layers) -> dict[int, frozenset[Place]]:
    """Where each parameter is read. What stands between two stacks of blocks counts as read before the second."""
    in_block = {op for block in layers.blocks for op in block.ops}
    last = max(in_block, default=-1)

    def place(op: int) -> Place:
        return "block" if op in in_block else ("before" if op < last else "after")

    return {t.index: frozenset(place(op.index) for op in graph.consumers(t.index)) for t in graph.params}
