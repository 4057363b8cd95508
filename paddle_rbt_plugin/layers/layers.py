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
    """True for the block that makes the layer, of which every layer has one; False for what is attached to it."""
    kind: int
    """Equal for segments that are structurally equal: same ops, attributes, shapes and wiring, and the same inputs needing
    gradients. Their external inputs (``external_inputs``) then correspond in order, and so do their results."""


@dataclass(frozen=True)
class Layers:
    """The segments of a graph, in program order."""

    segments: tuple[Segment, ...]

    @property
    def count(self) -> int:
        """Number of layers."""
        return 1 + max((s.layer for s in self.segments), default=-1)

    @property
    def blocks(self) -> tuple[Segment, ...]:
        """The block of every layer, in order."""
        return tuple(s for s in self.segments if s.is_block)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Per layer, all of its ops: the block with what is attached to it."""
        return tuple(tuple(op for s in self.segments if s.layer == i for op in s.ops) for i in range(self.count))

    def layer_of(self) -> dict[int, int]:
        """Layer of every op."""
        return {op: s.layer for s in self.segments for op in s.ops}
