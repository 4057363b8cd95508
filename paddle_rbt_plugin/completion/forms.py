"""Ops that take another form when their operands are sharded.

A plain ``embedding`` of Paddle 3.3.1 gathers a weight whose vocabulary is sharded before it looks anything up, and gathers
the gradient as well. ``c_embedding`` looks up the words of its own slice, whose results are summed; without shards both are
the same. What is completed and what is handed over must agree on the form, so both ask here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.placement import Placement

Attrs = Mapping[str, Any]

FORMS = frozenset({"embedding"})
"""The ops that may take another form."""


def sharded_form(
    type_: str,
    attrs: Attrs,
    shapes: Mapping[str, tuple[int, ...]],
    placements: Mapping[str, Placement],
    mesh: ProcessMesh,
    rank: int,
) -> tuple[str, Attrs]:
    """Type and attributes of the op that ``rank`` builds for one whose operands, by slot, have these shapes and placements.
    Only such attributes as where a rank's slice begins depend on the rank."""
    if type_ not in FORMS or attrs.get("padding_idx", -1) != -1:  # the other form knows no padding
        return type_, attrs
    rows, columns = placements["weight"].dims_mapping
    if rows < 0 or columns >= 0:
        return type_, attrs
    vocabulary = shapes["weight"][0]
    start = mesh.coordinate(rank, mesh.axes[rows]) * (vocabulary // mesh.shape[rows])
    return "c_embedding", {"start_index": start, "vocab_size": vocabulary}
