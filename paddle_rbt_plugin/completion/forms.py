"""Ops that take another form when their operands are sharded.

A plain ``embedding`` of Paddle 3.3.1 gathers a weight whose vocabulary is sharded before it looks anything up, and gathers
the gradient as well. ``c_embedding`` looks up the words of its own slice, whose results are summed; without shards both are
the same. Logits whose vocabulary is sharded are gathered before ``cross_entropy_with_softmax``;
``c_softmax_with_cross_entropy`` leaves them where they are and reduces three numbers per token: the largest logit, the sum of
the exponentials and the target's logit (arXiv 1909.08053, section 3). It has no kernel for CPUs; dygraph composes the same of
other ops (``handover.dygraph.ops``). Paddle's own passes for these two forms are not used, since they take all ranks of a mesh
for the group that shares the vocabulary and number it by fleet's topology. What is completed and what is handed over must agree
on the form, so all ask here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.placement import Placement

Attrs = Mapping[str, Any]

SHARDED_FORMS = {"c_embedding": "embedding", "c_softmax_with_cross_entropy": "cross_entropy_with_softmax"}
"""Each form, and the op whose form it is."""
FORMS = frozenset(SHARDED_FORMS.values())
"""The ops that may take another form."""
CPU_FORMS = frozenset({"embedding"})
"""Those of them that do on CPUs, and in programs of the legacy IR."""

LOSS_REDUCTIONS = 3
"""All-reduces inside ``c_softmax_with_cross_entropy``, each of the size of its loss."""


@dataclass(frozen=True)
class Form:
    """What an op is built as. ``axis`` is the mesh axis along which its kernel itself communicates, None for none: it runs in
    the ring ``ring_id`` of its attributes, which whoever builds it to be executed sets."""

    type: str
    attrs: Attrs
    axis: str | None = None
    slots: Mapping[str, str] = field(default_factory=dict)
    """Names of operand slots that are others than the op's."""


def forms_on(cluster: Cluster) -> frozenset[str]:
    """The ops that take another form on the devices of a cluster."""
    return CPU_FORMS if any(group.device.name.startswith("CPU") for group in cluster.groups) else FORMS


def sharded_form(
    type_: str,
    attrs: Attrs,
    shapes: Mapping[str, tuple[int, ...]],
    placements: Mapping[str, Placement],
    mesh: ProcessMesh,
    rank: int,
) -> Form:
    """The form of an op whose operands, by slot, have these shapes and placements, on ``rank``. Only such attributes as where
    a rank's slice begins depend on the rank."""
    if type_ == "embedding":
        return _embedding(attrs, shapes["weight"], placements["weight"], mesh, rank)
    if type_ == "cross_entropy_with_softmax":
        return _cross_entropy(attrs, shapes, placements["input"], mesh, rank)
    return Form(type_, attrs)


def _embedding(attrs: Attrs, shape: tuple[int, ...], placement: Placement, mesh: ProcessMesh, rank: int) -> Form:
    rows, columns = placement.dims_mapping
    if rows < 0 or columns >= 0 or attrs.get("padding_idx", -1) != -1:  # the other form knows no padding
        return Form("embedding", attrs)
    start = mesh.coordinate(rank, mesh.axes[rows]) * (shape[0] // mesh.shape[rows])
    return Form("c_embedding", {"start_index": start, "vocab_size": shape[0]})


def _cross_entropy(
    attrs: Attrs, shapes: Mapping[str, tuple[int, ...]], logits: Placement, mesh: ProcessMesh, rank: int
) -> Form:
    axis, last = logits.dims_mapping[-1], len(logits.dims_mapping) - 1
    plain = not attrs["soft_label"] and attrs["use_softmax"] and attrs["axis"] in (-1, last)
    if axis < 0 or logits.partial or not plain or len(shapes["label"]) != len(shapes["input"]):
        return Form("cross_entropy_with_softmax", attrs)
    name = mesh.axes[axis]
    ring = {"ring_id": 0, "rank": mesh.coordinate(rank, name), "nranks": mesh.shape[axis]}
    attrs = {"ignore_index": attrs["ignore_index"], **ring}
    return Form("c_softmax_with_cross_entropy", attrs, name, {"input": "logits"})
