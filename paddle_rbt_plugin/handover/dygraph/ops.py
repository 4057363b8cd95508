"""What dygraph makes of ops on sharded tensors: the forms that the plan was costed with.

Dygraph asks other rules than PIR does, and sums gradients otherwise. Measured on Paddle 3.3.1, one block of a GPT on two ranks
along ``mp`` (``tests/test_dygraph_ops.py`` measures it again):

- ``embedding`` gathers a weight whose vocabulary is sharded, and gathers it again for its gradient. So does ``c_embedding``
  of distributed tensors, whose result is wrong besides.
- ``cross_entropy_with_softmax`` gathers logits whose vocabulary is sharded.
- The sums that a row-parallel product leaves to its reader are finished by the addition that reads them, and once more by the
  gradient of that addition.
- The gradients of an activation that several column-parallel products read are summed over the ranks one by one, not once.
- The gradient of such a product whose result was gathered comes back whole, and is refused: ``matmul grad infer spmd ...
  verify error``.
- ``repeat_interleave`` gathers its operand, and ``expand`` of Paddle 3.0 gives a wrong gradient; both, and ``tile``, are spelt
  in other ops, see ``graph.rewrite``.
- Custom ops without a sharding rule are refused.
- Norms of sharded dimensions and a few more are wrong or fail, see ``whole_operands``.

``install`` puts functions in the place of Paddle's that compute on the local tensors of a rank (``local_tensors``) where the
operands lie so on a mesh of a plan, and are Paddle's own everywhere else. Their collectives are those that completion counts.
The loss is Megatron-LM's (arXiv 1909.08053, section 3), which runs on CPUs too. Products that are not written as
``nn.functional.linear`` stay Paddle's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.forms import Form, sharded_form
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.graph.names import CanonicalName
from paddle_rbt_plugin.graph.pir import dtype_name
from paddle_rbt_plugin.graph.rewrite import steps_for
from paddle_rbt_plugin.graph.steps import Step
from paddle_rbt_plugin.handover.dygraph import whole_operands
from paddle_rbt_plugin.handover.dygraph.local_tensors import (
    from_local,
    placements_of,
    reduced,
    shared_local,
    to_local,
    whole_along,
)
from paddle_rbt_plugin.handover.shared.conversion import Placements
from paddle_rbt_plugin.handover.shared.custom_ops import arguments, attribute_names, input_names, local_form, operand_of
from paddle_rbt_plugin.patching import SHARDED_MODELS, Attribute, Setting, paddle_change
from paddle_rbt_plugin.plugins import load_plugins

_meshes: list[Any] = []
_names: list[Mapping[str, CanonicalName]] = []
"""What plugins name custom ops after, once one has run since the last ``install``. Blocked plugins need not be told apart: a
plan of a model with a custom op that no plugin names is not made."""


def shard_ops(mesh: Any) -> None:
    """Makes the ops of this process take their sharded forms on a mesh of Paddle, from now on."""
    ops_take_sharded_forms.install()
    _names.clear()
    if mesh not in _meshes:
        _meshes.append(mesh)


@paddle_change(">=2.6,<3.4", permanent=SHARDED_MODELS)
def ops_take_sharded_forms() -> Iterator[Setting]:
    """Lets ops take the forms of ``_FORMS`` where their operands lie on a mesh of a plan.

    Reason: dygraph gathers what the plan divides, sums gradients several times, and computes norms of sharded dimensions
    wrongly; the module describes each.
    """
    for module, name, form in _FORMS:
        yield Attribute(module, name, _either(getattr(module, name), form))


def _either(original: Callable[..., Any], form: Callable[..., Any]) -> Callable[..., Any]:
    """The form where there is one of these operands, else what Paddle does."""

    @functools.wraps(original)
    def op(*args: Any, **kwargs: Any) -> Any:
        done = form(original, *args, **kwargs)
        return original(*args, **kwargs) if done is None else done

    return op


def _mesh_of(*tensors: Any) -> Any:
    """The mesh of a plan on which all of these lie; None where they do not, are unfinished sums, or no tensors of dygraph."""
    if not all(isinstance(t, paddle.Tensor) and t.is_dist() for t in tensors):
        return None
    if any(p.is_partial() for t in tensors for p in t.placements):
        return None
    return next((mesh for mesh in _meshes if all(t.process_mesh == mesh for t in tensors)), None)


def _axis_of(weight: Any) -> tuple[int, int] | None:
    """The one mesh axis along which a weight is sharded, and the dimension; None where there is not just one."""
    found = [(axis, p.get_dim()) for axis, p in enumerate(weight.placements) if p.is_shard()]
    return found[0] if len(found) == 1 else None


def _with(placements: Placements, axis: int, placement: Any) -> list[Any]:
    return [placement if i == axis else p for i, p in enumerate(placements)]


def _local_weight(weight: Any, mesh: Any, x: Placements) -> Any:
    """A weight whose gradient is to be summed over the ranks that read other parts of the activation, which lies like ``x``."""
    pairs = zip(placements_of(weight), x, strict=True)
    return to_local(weight, mesh, [dist.Partial() if w.is_replicated() and p.is_shard() else w for w, p in pairs])


def _linear(original: Any, x: Any, weight: Any, bias: Any = None, name: Any = None) -> Any:
    """x [..., n], weight [n, m]: column-parallel where m is sharded, row-parallel where n is."""
    whole_operands.with_whole_gradients(x, weight, bias)
    mesh = _mesh_of(*(t for t in (x, weight, bias) if t is not None))
    if mesh is None or (along := _axis_of(weight)) is None:
        return None
    axis, dim = along
    read, last = placements_of(x), x.ndim - 1
    if any(p.is_shard(last) for p in _with(read, axis, dist.Replicate())):
        return None
    if dim == 1 and read[axis].is_shard(last):  # the product of another one that is divided
        x = whole_along(x, [axis])
        read = placements_of(x)
    if dim == 1 and read[axis].is_replicated() and (bias is None or bias.placements[axis].is_shard()):
        local_x = shared_local(x, mesh, _with(read, axis, dist.Partial()))
        local_bias = None if bias is None else _local_weight(bias, mesh, read)
        made = _with(read, axis, dist.Shard(last))
        return from_local(original(local_x, _local_weight(weight, mesh, read), local_bias), mesh, made, made)
    in_reach = read[axis].is_replicated() or read[axis].is_shard(last)
    if dim == 0 and in_reach and (bias is None or bias.placements[axis].is_replicated()):
        sharded, made, kept = (_with(read, axis, p) for p in (dist.Shard(last), dist.Partial(), dist.Replicate()))
        if read != sharded:
            x = dist.reshard(x, mesh, sharded)
        local = original(to_local(x, mesh, sharded), _local_weight(weight, mesh, kept))
        out = from_local(local, mesh, made, kept)
        return out if bias is None else out + paddle.cast(bias, out.dtype)
    return None


def _embedding(original: Any, x: Any, weight: Any, padding_idx: int = -1, sparse: bool = False) -> Any:
    """x holds numbers of words, weight is [words, hidden] with its words sharded."""
    mesh = _mesh_of(x, weight)
    if mesh is None or (along := _axis_of(weight)) is None or not x.placements[along[0]].is_replicated():
        return None
    form = _form(mesh, "embedding", {"padding_idx": padding_idx}, {"weight": weight})
    if form.type != "c_embedding":
        return None
    read = placements_of(x)
    first, words = form.attrs["start_index"], form.attrs["vocab_size"]
    local = paddle._C_ops.c_embedding(_local_weight(weight, mesh, read), x._local_value(), first, words)
    return from_local(local, mesh, _with(read, along[0], dist.Partial()), read)


def _cross_entropy(
    original: Any,
    logits: Any,
    label: Any,
    soft_label: bool = False,
    use_softmax: bool = True,
    numeric_stable_mode: bool = True,
    ignore_index: int = -100,
    axis: int = -1,
) -> Any:
    """The softmax and the loss of logits [..., words] with their words sharded and labels [..., 1]."""
    mesh = _mesh_of(logits, label)
    if mesh is None:
        return None
    attrs = {"soft_label": soft_label, "use_softmax": use_softmax, "ignore_index": ignore_index, "axis": axis}
    form = _form(mesh, "cross_entropy_with_softmax", attrs, {"input": logits, "label": label})
    if form.axis is None:
        whole = [p if not p.is_shard(axis % logits.ndim) else dist.Replicate() for p in placements_of(logits)]
        if not soft_label or whole == placements_of(logits):
            return None
        whole_logits = dist.reshard(logits, mesh, whole)  # Paddle refuses to do so itself where labels are soft
        return original(whole_logits, label, soft_label, use_softmax, numeric_stable_mode, ignore_index, axis)
    along, read = mesh.dim_names.index(form.axis), placements_of(logits)
    per_token = _with(read, along, dist.Replicate())
    local, labels = to_local(logits, mesh, read), dist.reshard(label, mesh, per_token)._local_value()
    first = form.attrs["rank"] * local.shape[-1]
    softmax, loss = _LossOfShards.apply(local, labels, first, ignore_index, mesh, along, _is_autocast())
    return from_local(softmax, mesh, read, read), from_local(loss, mesh, per_token, per_token)


_SMALLEST_ON_CPUS = -64.0
"""Paddle's softmax on CPUs takes no logit for less than so far below the largest (``ValueClip`` in phi/kernels/funcs)."""


class _LossOfShards(PyLayer):
    """Softmax and cross entropy of logits [..., part of the vocabulary] and labels [..., 1], in float32 at least."""

    @staticmethod
    def forward(
        ctx: Any, logits: Any, label: Any, start: int, ignore_index: int, mesh: Any, along: int, full_precision: bool
    ) -> tuple[Any, Any]:
        dtype = logits.dtype
        label = label.astype("int64")
        kept = label != ignore_index
        mine = (label >= start) & (label < start + logits.shape[-1]) & kept
        target = paddle.where(mine, label - start, paddle.zeros_like(label))
        wide = "float64" if dtype == paddle.float64 else "float32"
        logits = logits.astype(wide)
        logits = logits - reduced(paddle.max(logits, axis=-1, keepdim=True), mesh, along, dist.ReduceType.kRedMax)
        if not paddle.is_compiled_with_cuda():
            logits = paddle.clip(logits, min=_SMALLEST_ON_CPUS)
        picked = paddle.take_along_axis(logits, target, axis=-1) * mine.astype(wide)
        picked = reduced(picked, mesh, along)
        weights = logits.exp_()
        total = reduced(paddle.sum(weights, axis=-1, keepdim=True), mesh, along)
        loss = (paddle.log(total) - picked) * kept.astype(wide)
        softmax = weights.divide_(total).astype(dtype)
        ctx.save_for_backward(softmax, target, mine, kept)
        ctx.mark_non_differentiable(softmax)
        return softmax, loss if full_precision else loss.astype(dtype)

    @staticmethod
    def backward(ctx: Any, _: Any, gradient: Any) -> Any:
        softmax, target, mine, kept = ctx.saved_tensor()
        gradient = (gradient * kept.astype(gradient.dtype)).astype(softmax.dtype)
        taken = -gradient * mine.astype(softmax.dtype)
        return paddle.put_along_axis(softmax * gradient, target, taken, axis=-1, reduce="add")


def _is_autocast() -> bool:
    """Whether ``paddle.amp.auto_cast`` is on, which keeps losses in float32."""
    tracer = paddle.base.framework._dygraph_tracer()
    return tracer._amp_level != paddle.base.core.AmpLevel.O0


def _form(mesh: Any, type_: str, attrs: Mapping[str, Any], operands: Mapping[str, Any]) -> Form:
    """The form of an op on dygraph tensors by slot, as completion finds it."""
    shapes = {slot: tuple(t.shape) for slot, t in operands.items()}
    placements = {slot: _placement(t) for slot, t in operands.items()}
    return sharded_form(type_, attrs, shapes, placements, _planned(mesh), dist.get_rank())


def _planned(mesh: Any) -> ProcessMesh:
    return ProcessMesh(tuple(mesh.dim_names), tuple(mesh.shape), tuple(mesh.process_ids))


def _placement(tensor: Any) -> Placement:
    dims = [-1] * tensor.ndim
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            dims[placement.get_dim()] = axis
    return Placement(tuple(dims))


def _custom_op(original: Any, name: str, *args: Any) -> Any:
    """A custom op on the local tensors, see ``custom_ops``; Paddle refuses it on distributed ones."""
    names = input_names(name)
    slots = [list(a) if isinstance(a, (list, tuple)) else [] if a is None else [a] for a in args[: len(names)]]
    mesh = _mesh_of(*(t for slot in slots for t in slot)) if any(slots) else None
    if mesh is None:
        return None
    attrs = dict(zip(attribute_names(name), args[len(names) :], strict=True))
    operands = {s: [operand_of(t, _placement(t)) for t in of] for s, of in zip(names, slots, strict=True)}
    if not _names:
        _names.append(load_plugins().op_names)
    form = local_form(name, attrs, operands, _planned(mesh), _names[0])
    places = iter(zip(form.needs, form.gradients, strict=True))

    def local(tensor: Any) -> Any:
        need, gradient = next(places)
        return to_local(tensor if placements_of(tensor) == need else dist.reshard(tensor, mesh, need), mesh, gradient)

    made = original(*arguments(name, [[local(t) for t in of] for of in slots], attrs))
    return [from_local(value, mesh, p, p) for value, p in zip(made, form.results, strict=True)]


def _expand(original: Any, x: Any, shape: Any) -> Any:
    sizes = _numbers(shape, x)
    return (
        _rewritten("expand", x, [n if size == -1 else size for n, size in zip(x.shape, sizes, strict=True)]) if sizes else None
    )


def _tile(original: Any, x: Any, repeat_times: Any) -> Any:
    times = _numbers(repeat_times, x)
    return _rewritten("tile", x, [n * m for n, m in zip(x.shape, times, strict=True)]) if times else None


def _repeat_interleave(original: Any, x: Any, repeats: Any, axis: Any = None, *_: Any, **__: Any) -> Any:
    if not isinstance(repeats, int) or axis is None:
        return None
    axis = axis % len(x.shape)
    return _rewritten("repeat_interleave", x, [n * repeats if d == axis else n for d, n in enumerate(x.shape)], axis=axis)


def _numbers(values: Any, x: Any) -> list[int]:
    """The sizes for each dimension of ``x``; none where there are others, or tensors."""
    plain = isinstance(values, (list, tuple)) and len(values) == len(x.shape) and all(isinstance(n, int) for n in values)
    return list(values) if plain else []


def _rewritten(type_: str, x: Any, shape: Sequence[int], **attrs: Any) -> Any:
    """What ``graph.rewrite`` makes of an op on a sharded activation."""
    if _mesh_of(x) is None or x.is_leaf or not any(p.is_shard() for p in x.placements):
        return None
    steps = steps_for(type_, ["var"], [tuple(x.shape)], tuple(shape), attrs, dtype_name(x.dtype))
    return _run(steps, x) if steps else None


def _run(steps: Sequence[Step], x: Any) -> Any:
    values: list[Any] = []
    for step in steps:
        operands = [x if ref < 0 else values[ref] for ref in step.inputs.values()]
        values.append(_STEPS[step.type](*operands, **step.attrs))
    return values[-1]


_STEPS: Mapping[str, Callable[..., Any]] = {
    "full": lambda shape, value, dtype: paddle.full(shape, value, dtype),
    "add": paddle.add,
    "unsqueeze": paddle.unsqueeze,
    "reshape": paddle.reshape,
}

_FORMS: Sequence[tuple[Any, str, Callable[..., Any]]] = (
    (paddle.nn.functional, "linear", _linear),
    (paddle._C_ops, "embedding", _embedding),
    (paddle._C_ops, "cross_entropy_with_softmax", _cross_entropy),
    (paddle._C_ops, "expand", _expand),
    (paddle._C_ops, "tile", _tile),
    (paddle._C_ops, "repeat_interleave", _repeat_interleave),
    (paddle._C_ops, "_run_custom_op", _custom_op),
    (paddle._C_ops, "p_norm", whole_operands.p_norm),
    (paddle._C_ops, "logsumexp", whole_operands.logsumexp),
    (paddle._C_ops, "concat", whole_operands.concat),
    (paddle._C_ops, "matmul", whole_operands.matmul),
    *((paddle._C_ops, name, whole_operands.convolution) for name in whole_operands.CONVOLUTIONS),
    *((module, name, whole_operands.elementwise) for module, name in whole_operands.ELEMENTWISE),
    (paddle._C_ops, "bmm", whole_operands.bmm),
    (paddle.Tensor, "__matmul__", whole_operands.matmul_operator),
    (sys.modules[whole_operands.EINSUM], "einsum_v2", whole_operands.einsum),
)
"""Where Paddle keeps an op that has another form, its name there, and the form, which answers None where it does not apply."""
