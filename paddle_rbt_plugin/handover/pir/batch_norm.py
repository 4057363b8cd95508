"""Batch norms of a sharded batch in PIR programs, see ``completion.synchronised``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import paddle

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.distributed_ops import call_op, finished, placement_of, producer_of, set_placement
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.question import HALF
from paddle_rbt_plugin.completion.synchronised import BATCH_NORM, batch_norm_placements, has_fixed_statistics
from paddle_rbt_plugin.graph.pir import dtype_name
from paddle_rbt_plugin.handover.pir.local_ops import build_on_local_tensors, spelt
from paddle_rbt_plugin.handover.shared.conversion import paddle_mesh
from paddle_rbt_plugin.handover.shared.custom_ops import LocalForm, operand_of

_SLOTS = ("x", "mean", "variance", "scale", "bias")


def build_batch_norm(
    op: Any, attrs: Mapping[str, Any], inputs: Mapping[str, Sequence[Any]], mesh: ProcessMesh
) -> tuple[list[Any], list[Any]]:
    """Builds again a batch norm whose samples are sharded, on its distributed inputs by slot. ``op`` is the one in the serial
    program. Returns the ops built and the results."""
    values = [inputs[slot][0] for slot in _SLOTS]
    operands = [operand_of(v, placement_of(v)) for v in values]
    where = batch_norm_placements(attrs, operands, [len(op.result(0).shape)])
    builder = _Builder(paddle_mesh(mesh))
    if not has_fixed_statistics(attrs):
        values = builder.with_statistics(attrs, *values)
        # The sums of what the ranks compute of these gradients are finished before those of the statistics read them.
        where = batch_norm_placements({**attrs, "use_global_stats": True}, operands, [len(op.result(0).shape)])
    form = LocalForm(spelt(where.needs, mesh), spelt(where.gradients, mesh), spelt(where.results, mesh))
    local_attrs = {**attrs, "use_global_stats": True}

    def make(local: Mapping[str, list[Any]]) -> list[Any]:
        return call_op(BATCH_NORM, local_attrs.items(), local)[:1]

    built, results = build_on_local_tensors(
        form, {slot: [value] for slot, value in zip(_SLOTS, values, strict=True)}, paddle_mesh(mesh), make
    )
    kept = builder.running or values[1:3]
    others = [*kept, *values[1:3], values[1]]  # the statistics of the batch, and scratch space, are read in backward only
    return [*builder.built, *built], [*results, *others[: op.num_results() - 1]]


class _Builder:
    """Builds ops on one mesh, and keeps them."""

    def __init__(self, mesh: Any):
        self.mesh = mesh
        self.built: list[Any] = []
        self.running: list[Any] = []
        """The running statistics, once they are changed."""

    def with_statistics(self, attrs: Mapping[str, Any], x: Any, mean: Any, variance: Any, scale: Any, bias: Any) -> list[Any]:
        """The operands of a norm with fixed statistics, as the module says; changes the running statistics in place."""
        channels_last = attrs["data_format"] in ("NHWC", "NDHWC", "NLC")
        last = len(x.shape) - 1
        spatial = [dim for dim in range(1, last + 1) if dim != (last if channels_last else 1)]
        count = self.full((1,), 1.0 / (x.shape[0] * prod(x.shape[dim] for dim in spatial)))
        wide = self.op("cast", {"x": x}, dtype="float32") if dtype_name(x.dtype) in HALF else x
        m = self.op("multiply", {"x": self.total(wide, spatial), "y": count})
        squares = self.op("multiply", {"x": self.total(self.op("multiply", {"x": wide, "y": wide}), spatial), "y": count})
        v = self.op("relu", {"x": self.op("subtract", {"x": squares, "y": self.op("multiply", {"x": m, "y": m})})})
        fixed_m, fixed_v = self.constant(m), self.constant(v)
        inverse = self.op("rsqrt", {"x": self.op("add", {"x": v, "y": self.full((1,), attrs["epsilon"])})})
        ratio = self.op("divide", {"x": inverse, "y": self.constant(inverse)})
        shift = self.op("multiply", {"x": self.op("subtract", {"x": fixed_m, "y": m}), "y": inverse})
        for running, new in ((mean, fixed_m), (variance, fixed_v)):
            self.running.append(self.moved(running, new, attrs["momentum"]))
        return [
            x,
            self.constant(m),
            self.constant(v),
            self.op("multiply", {"x": scale, "y": ratio}),
            self.op("add", {"x": bias, "y": self.op("multiply", {"x": scale, "y": shift})}),
        ]

    def total(self, x: Any, spatial: Sequence[int]) -> Any:
        """The sum of x per channel, over all ranks. A ``sum`` over samples would gather x for its gradient; a product does
        not."""
        if spatial:
            x = self.op("sum", {"x": x, "axis": self.numbers(spatial)}, dtype="undefined", keepdim=False)
        samples, channels = x.shape
        row = self.op("matmul", {"x": self.full((1, samples), 1.0), "y": x}, transpose_x=False, transpose_y=False)
        return self.op("reshape", {"x": row, "shape": self.numbers([channels])})

    def moved(self, running: Any, new: Any, momentum: float) -> Any:
        """Changes a running statistic in place."""
        old = self.op("multiply", {"x": running, "y": self.full((1,), momentum)})
        step = self.op("multiply", {"x": new, "y": self.full((1,), 1.0 - momentum)})
        return self.kept(paddle._C_ops.assign_out_(self.op("add", {"x": old, "y": step}), running))

    def constant(self, value: Any) -> Any:
        """The value, through which no gradient flows."""
        made = self.op("assign", {"x": value})
        made.stop_gradient = True
        return made

    def full(self, shape: tuple[int, ...], value: float) -> Any:
        made = self.placed(paddle._C_ops.full(list(shape), value, paddle.float32, paddle.base.core.Place()))
        made.stop_gradient = True
        return made

    def numbers(self, values: Sequence[int]) -> Any:
        return self.placed(paddle._C_ops.full_int_array(list(values), paddle.int64, paddle.base.core.Place()))

    def op(self, name: str, inputs: Mapping[str, Any], **attrs: Any) -> Any:
        (made,) = call_op(name, attrs.items(), {slot: [value] for slot, value in inputs.items()})
        return finished(self.kept(made))

    def placed(self, constant: Any) -> Any:
        set_placement(constant, self.mesh, Placement.replicated(len(constant.shape)))
        return self.kept(constant)

    def kept(self, value: Any) -> Any:
        self.built.append(producer_of(value))
        return value
