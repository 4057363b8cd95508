"""What the oracle is asked: an op, with its inputs where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from paddle_rbt_plugin.completion.placement import Placement

HALF = frozenset({"float16", "bfloat16"})
"""The dtypes of half precision."""


class Operand(NamedTuple):
    """An input as it arrives at the op."""

    shape: tuple[int, ...]
    dtype: str
    placement: Placement
    stop_gradient: bool


class Question(NamedTuple):
    """An op with its inputs by slot. ``gradients`` is given for the backward pass: the placement of the gradient of each
    result, None for a result without one."""

    op: str
    attrs: tuple[tuple[str, Any], ...]
    slots: tuple[tuple[str, tuple[Operand, ...]], ...]
    gradients: tuple[Placement | None, ...] | None = None
    results: tuple[tuple[tuple[int, ...], str], ...] = ()
    """Shape and dtype of each result, where the graph knows them. An op that is built has its own."""

    @property
    def operands(self) -> tuple[Operand, ...]:
        return tuple(o for _, slot in self.slots for o in slot)

    @property
    def forward(self) -> Question:
        """The question about the op itself."""
        return self._replace(gradients=None, results=())

    @property
    def whole(self) -> Question:
        """The question about operands, and gradients, that are whole."""
        question = self.placed([Placement.replicated(len(o.shape)) for o in self.operands])
        if self.gradients is None:
            return question
        whole = [None if g is None else Placement.replicated(len(g.dims_mapping)) for g in self.gradients]
        return question._replace(gradients=tuple(whole))

    def placed(self, placements: Sequence[Placement]) -> Question:
        """The question about operands with these placements."""
        others = iter(placements)
        slots = tuple((slot, tuple(o._replace(placement=next(others)) for o in operands)) for slot, operands in self.slots)
        return self._replace(slots=slots)

    def in_float32(self) -> Question:
        """The question about float32 operands. Paddle refuses ops for which its wheel has no kernel, and CPU wheels lack some
        of half precision (the gradient of softmax). Placements do not depend on the precision."""
        slots = tuple(
            (slot, tuple(o._replace(dtype="float32") if o.dtype in HALF else o for o in operands))
            for slot, operands in self.slots
        )
        return self._replace(slots=slots)
