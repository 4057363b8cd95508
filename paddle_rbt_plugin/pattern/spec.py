"""Shard specs: how a pattern says which dimension of a tensor goes along which parallel axis.

A spec holds one entry per dimension: the name of a logical axis, or None for a dimension that stays whole. One ``...``
stands for any number of Nones, so ``("dp", ..., None)`` fits a tensor of any rank from two upwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType

from paddle_rbt_plugin.errors import PatternError

Spec = tuple[str | EllipsisType | None, ...]
"""A shard spec as a pattern writes it."""

ExpandedSpec = tuple[str | None, ...]
"""A shard spec with exactly one entry per dimension of its tensor."""

SHARD_AXES = ("dp", "mp", "sp", "ep", "cp")
"""The axes that can shard a tensor dimension. ``pp`` splits the program, never a tensor."""


def check_spec(spec: object, ndim: int | None = None, of: str = "the tensor") -> Spec:
    """``spec`` as a tuple, once it is known to be well formed; ``ndim`` is the tensor's rank where the pattern fixes it.

    Raises PatternError, which names ``of`` and what would be right.
    """
    if not isinstance(spec, (tuple, list)):
        raise PatternError(f'{of}: a shard spec is a tuple with one entry per dimension, like ("dp", ..., None), not {spec!r}')
    for entry in spec:
        if entry is not None and entry is not ... and entry not in SHARD_AXES:
            raise PatternError(
                f"{of}: {entry!r} in {spell(spec)} is neither an axis ({', '.join(SHARD_AXES)}), nor None for a dimension that "
                "stays whole, nor ... for any number of them"
            )
    if sum(entry is ... for entry in spec) > 1:
        raise PatternError(f"{of}: {spell(spec)} holds ... more than once, so its entries cannot be assigned to dimensions")
    axes = [entry for entry in spec if isinstance(entry, str)]
    if len(set(axes)) < len(axes):
        raise PatternError(f"{of}: {spell(spec)} shards two dimensions along one axis; an axis may be named once")
    checked: Spec = tuple(spec)
    if ndim is not None:
        expand(checked, ndim, of)
    return checked


def expand(spec: Spec, ndim: int, of: str = "the tensor") -> ExpandedSpec:
    """``spec`` with ``...`` replaced by as many Nones as a tensor of ``ndim`` dimensions needs.

    Raises PatternError where the number of entries cannot fit; the message names ``of``.
    """
    named = tuple(entry for entry in spec if entry is not ...)
    if len(named) == len(spec) == ndim:
        return named
    if len(named) == len(spec) or len(named) > ndim:
        at_least = "" if len(named) == len(spec) else "at least "
        raise PatternError(
            f"{of}: {spell(spec)} has entries for {at_least}{len(named)} dimensions, but the tensor has {ndim}; write one "
            "entry per dimension, or ... for those that stay whole"
        )
    gap = spec.index(...)
    return named[:gap] + (None,) * (ndim - len(named)) + named[gap:]


def dims_mapping(spec: Spec, ndim: int, axes: Sequence[str], of: str = "the tensor") -> tuple[int, ...]:
    """Paddle's dims mapping of ``spec`` for a tensor of ``ndim`` dimensions on a process mesh with the axes ``axes``: per
    dimension the position of its axis in the mesh, or -1. An axis that the mesh lacks shards nothing.

    Raises PatternError, naming ``of``, for a spec that is malformed or does not fit ``ndim``.
    """
    positions = {axis: i for i, axis in enumerate(axes)}
    return tuple(-1 if axis is None else positions.get(axis, -1) for axis in expand(check_spec(spec, of=of), ndim, of))


def spell(spec: Sequence[object]) -> str:
    """``spec`` as it is written in a pattern."""
    entries = ["..." if entry is ... else repr(entry) for entry in spec]
    return f"({', '.join(entries)}{',' if len(entries) == 1 else ''})"
