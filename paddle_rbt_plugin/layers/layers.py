"""Layers: the repeated blocks of a model, and what stands before, between and after them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """Consecutive ops of a graph. Segments cover all ops, in program order, without overlap."""

    ops: tuple[int, ...]
    layer: int
    """The layer it belongs to: a block is its own; the embedding belongs to the first, head and loss to the last."""
    is_block: bool
    """True for a repeated block, False for what is attached to one."""
    kind: int
    """Equal for segments that are structurally equal: same ops, attributes, shapes and wiring."""


@dataclass(frozen=True)
class Layers:
    segments: tuple[Segment, ...]

    @property
    def count(self) -> int:
        return 1 + max((s.layer for s in self.segments), default=-1)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Per layer, all of its ops: the block with what is attached to it."""
        return tuple(tuple(op for s in self.segments if s.layer == i for op in s.ops) for i in range(self.count))

    def layer_of(self) -> dict[int, int]:
        """Layer of every op."""
        return {op: s.layer for s in self.segments for op in s.ops}
