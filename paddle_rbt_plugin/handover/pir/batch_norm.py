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
from paddle_rbt_plugin.completion.synchronised import BATCH_NORM, CHANNELS_LAST, batch_norm_placements, has_fixed_statistics
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
    target, builder = paddle_mesh(mesh), _Builder(paddle_mesh(mesh))
    needs, gradients, slots = list(where.needs), list(where.gradients), dict(zip(_SLOTS, values, strict=True))
    if has_fixed_statistics(attrs):
        # Results are marked as those of the serial op, which no parameter may be: it would be freed after its last use.
        slots |= {slot: builder.constant(slots[slot]) for slot in ("mean", "variance")}
    else:
        x, mean, variance, affine = builder.with_statistics(attrs, *values)
        slots = {"x": x, "mean": mean, "variance": variance, "affine": affine}
        needs, gradients = needs[:4], [*gradients[:3], needs[3].summands({needs[0].dims_mapping[0]})]
    form = LocalForm(spelt(needs, mesh), spelt(gradients, mesh), spelt(where.results, mesh))

    def make(local: Mapping[str, list[Any]]) -> list[Any]:
        read = dict(local)
        if "affine" in read:
            (affine,) = read.pop("affine")
            read["scale"], read["bias"] = ([half] for half in paddle.split(affine, 2))
        return call_op(BATCH_NORM, {**attrs, "use_global_stats": True}.items(), read)[:1]

    built, results = build_on_local_tensors(form, {slot: [value] for slot, value in slots.items()}, target, make)
    statistics = [slots["mean"], slots["variance"]]
    others = [*(builder.running or statistics), *statistics, statistics[0]]  # the last three are read in backward only
    return [*builder.built, *built], [*results, *others[: op.num_results() - 1]]


class _Builder:
    """Builds ops on one mesh, and keeps them."""

    def __init__(self, mesh: Any):
        self.mesh = mesh
        self.built: list[Any] = []
        self.running: list[Any] = []
        """The running statistics, once they are changed."""

    def with_statistics(self, attrs: Mapping[str, Any], x: Any, mean: Any, variance: Any, scale: Any, bias: Any) -> list[Any]:
        """The operands of a norm with fixed statistics, as the module says, scale and bias in one; changes the running
        statistics in place."""
        m, squares = self.halves(self.means(x, attrs))
        v = self.op("relu", {"x": self.op("subtract", {"x": squares, "y": self.op("multiply", {"x": m, "y": m})})})
        fixed_m, fixed_v = self.constant(m), self.constant(v)
        inverse = self.op("rsqrt", {"x": self.op("add", {"x": v, "y": self.full((1,), attrs["epsilon"])})})
        ratio = self.op("divide", {"x": inverse, "y": self.constant(inverse)})
        shift = self.op("multiply", {"x": self.op("subtract", {"x": fixed_m, "y": m}), "y": inverse})
        for running, new in ((mean, fixed_m), (variance, fixed_v)):
            self.running.append(self.moved(running, new, attrs["momentum"]))
        scales = self.op("multiply", {"x": scale, "y": ratio})
        shifts = self.op("add", {"x": bias, "y": self.op("multiply", {"x": scale, "y": shift})})
        rows = [self.reshaped(v, [1, -1]) for v in (scales, shifts)]  # Paddle's rule for vectors fails in backward
        return [x, self.constant(m), self.constant(v), self.reshaped(self.joined(*rows), [-1])]

    def means(self, x: Any, attrs: Mapping[str, Any]) -> Any:
        """The means of x and of x^2 per channel over all ranks, one behind the other."""
        last = len(x.shape) - 1
        channel = last if attrs["data_format"] in CHANNELS_LAST else 1
        spatial = [dim for dim in range(1, last + 1) if dim != channel]
        wide = self.op("cast", {"x": x}, dtype="float32") if dtype_name(x.dtype) in HALF else x
        sums = [wide, self.op("multiply", {"x": wide, "y": wide})]
        if spatial:
            axes = self.numbers(spatial)
            sums = [self.op("sum", {"x": v, "axis": axes}, dtype="undefined", keepdim=False) for v in sums]
        share = self.full((1, x.shape[0]), 1.0 / (x.shape[0] * prod(x.shape[dim] for dim in spatial)))
        # A ``sum`` over the samples would gather x for its gradient; a product does not.
        return self.op("matmul", {"x": share, "y": self.joined(*sums)}, transpose_x=False, transpose_y=False)

    def reshaped(self, x: Any, shape: Sequence[int]) -> Any:
        return self.op("reshape", {"x": x, "shape": self.numbers(shape)})

    def joined(self, first: Any, second: Any) -> Any:
        """Two tensors [n, c] as one [n, 2 c]."""
        axis = self.placed(paddle._C_ops.full([1], 1, paddle.int32, paddle.base.core.Place()))
        (made,) = call_op("concat", (), {"x": [first, second], "axis": [axis]})
        return finished(self.kept(made))

    def halves(self, row: Any) -> list[Any]:
        """The two halves of a row [1, 2 n], each [n]."""
        rows = self.reshaped(row, [2, -1])
        attrs = {"axes": (0,), "infer_flags": (1,), "decrease_axis": (0,)}
        cuts = ({"starts": self.numbers([i]), "ends": self.numbers([i + 1])} for i in range(2))
        return [self.op("slice", {"input": rows, **cut}, **attrs) for cut in cuts]

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
