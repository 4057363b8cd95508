"""Traces a Layer into a serial forward program."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import paddle
from paddle import nn

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.graph import Batch, Graph, read_program
from paddle_rbt_plugin.graph.batch import OPEN, find_batches
from paddle_rbt_plugin.graph.mixtures import Dispatch, fold_mixtures
from paddle_rbt_plugin.handover.pir.balanced_load import BalancedLoad
from paddle_rbt_plugin.handover.pir.native import (
    errors_as_raised,
    natively,
    traces_record_apart,
    untraceable,
    values_as_balanced,
    warn_of_transcription,
)
from paddle_rbt_plugin.handover.pir.static_shapes import make_shapes_static
from paddle_rbt_plugin.notes import note
from paddle_rbt_plugin.tuner import collection_paused


@dataclass(frozen=True)
class Trace:
    """A traced Layer: its PIR program and the graph read from it."""

    program: Any
    graph: Graph


class _WithLoss(nn.Layer):
    """A Layer and its loss as one forward function of a list of tensors, the shape that ``to_static`` takes."""

    def __init__(self, layer: nn.Layer, loss: Callable[..., Any] | None, inputs: int):
        super().__init__()
        self.layer = layer
        self.loss = loss
        self.inputs = inputs

    def forward(self, tensors):
        output = self.layer(*tensors[: self.inputs])
        if self.loss is None:
            return output
        outputs = output if isinstance(output, (list, tuple)) else [output]
        return self.loss(*outputs, *tensors[self.inputs :])


@collection_paused()
def trace_layer(
    layer: nn.Layer,
    input_spec: Sequence[Any],
    loss: Callable[..., Any] | None = None,
    labels_spec: Sequence[Any] = (),
    batch: Batch | None = None,
) -> Trace:
    """Traces ``layer`` on inputs of the given specs, its loss included.

    With ``loss=None`` the forward itself returns the loss. ``batch`` is what ``with_batch`` says of the specs. Parameters built
    under ``LazyGuard`` are never allocated. Raises UnsupportedProgram where the Layer cannot be traced, TunerError for specs
    without a size or a name clash.
    """
    specs = [_named(spec, f"input{i}") for i, spec in enumerate(input_spec)]
    specs += [_named(spec, f"label{i}") for i, spec in enumerate(labels_spec)]
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise TunerError(
            f"two inputs have the same name: {sorted(n for n in set(names) if names.count(n) > 1)}; name each once"
        )
    wrapped = _WithLoss(layer, loss, len(input_spec))
    wrapped.train() if layer.training else wrapped.eval()
    was_dynamic = paddle.in_dynamic_mode()
    if not was_dynamic:
        paddle.disable_static()
    try:
        program, outputs, load = _trace(wrapped, specs, specs[0].shape[0] if batch is None else batch.size)
        make_shapes_static(program)
    finally:
        if not was_dynamic:
            paddle.enable_static()
    structured = {p.name: name for name, p in layer.named_parameters()}
    graph = read_program(program, _scalar(outputs), structured_names=structured).with_batch(batch)
    return Trace(program, _balanced(graph, program, load))


def _balanced(graph: Graph, program: Any, load: BalancedLoad) -> Graph:
    """The graph of a program that was traced under a balanced load, its mixtures folded."""
    if not load.is_assumed:
        return graph
    tensors = _tensors_of(program, graph)
    dispatches = [Dispatch(tensors[made.id], tensors.get(mask.id, -1), some) for mask, made, some in load.dispatches.values()]
    folded, mixtures = fold_mixtures(graph, dispatches)
    notes = (
        note("balanced_load", mixtures=number, experts=m.experts, room=m.places.room, group=m.places.group)
        for m, number in Counter(mixtures).items()
    )
    alone = len(dispatches) - sum(m.experts for m in mixtures)
    return folded.assuming(*notes, *([note("balanced_branches", branches=alone)] if alone or not mixtures else []))


def _tensors_of(program: Any, graph: Graph) -> dict[int, int]:
    """The tensors of a graph, by the ids of the values that it was read from."""
    ops = program.global_block().ops
    results = ((value.id, t) for op in graph.ops for value, t in zip(ops[op.source].results(), op.results, strict=False))
    return dict(results)


def with_batch(
    input_spec: Sequence[Any], labels_spec: Sequence[Any], global_batch: int | None
) -> tuple[list[Any], list[Any], Batch | None]:
    """The specs with their batch dimension (``graph.batch`` says which) set to ``global_batch`` where that is given, and the
    batch; None where the shapes leave it undecided and nothing depends on it yet.

    Raises TunerError for a batch dimension without a size when no global batch is given, and for a global batch where the
    shapes do not say which inputs hold one sample in each row."""
    specs = [_named(spec, f"input{i}") for i, spec in enumerate(input_spec)]
    labels = [_named(spec, f"label{i}") for i, spec in enumerate(labels_spec)]
    batches = find_batches({spec.name: spec.shape for spec in (*specs, *labels)})
    if len(batches) > 1:
        batches = [batch for batch in batches if batch.size == global_batch] or batches
    if len(batches) > 1 and global_batch is not None:
        shapes = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in (*specs, *labels))
        raise TunerError(
            f"the inputs {shapes} do not show which dimension is the batch that global_batch={global_batch} sets; use None as "
            "the first dimension of inputs that hold one sample per row"
        )
    if len(batches) != 1:
        return specs, labels, None
    size = global_batch or batches[0].size
    for spec in (*specs, *labels):
        if spec.name in batches[0].inputs:
            if size == OPEN:
                raise TunerError(f"the batch dimension of input {spec.name!r} has no size; give global_batch=...")
            spec.shape = (size, *spec.shape[1:])
    return specs, labels, replace(batches[0], size=size)


def _scalar(outputs: Any) -> Any:
    """The loss among what forward returns, where that is plain: a model may make other scalars, such as a copy to log."""
    first = outputs[0] if isinstance(outputs, (list, tuple)) and outputs else outputs
    return first if hasattr(first, "shape") and math.prod(first.shape) == 1 else None


def _trace(layer: nn.Layer, specs: list[Any], batch: int | None) -> tuple[Any, Any, BalancedLoad]:
    """The program of the forward pass, its outputs, and where it assumes a load of experts."""
    load = BalancedLoad(batch)
    try:
        with natively(), values_as_balanced.apply(load):
            return *_programmed(layer, specs), load
    except (Exception, SystemExit) as error:  # the model's own Python may raise anything
        native_error = error
    warn_of_transcription(native_error)
    try:
        with traces_record_apart.apply(), errors_as_raised.apply():
            return *_programmed(layer, specs), BalancedLoad()
    except (Exception, SystemExit) as error:
        raise untraceable(layer.layer, native_error, error) from native_error


def _programmed(layer: nn.Layer, specs: list[Any]) -> tuple[Any, Any]:
    traced = paddle.jit.to_static(layer.forward, full_graph=True, input_spec=[specs]).concrete_program
    return traced.main_program, traced.outputs


def _named(spec: Any, default: str) -> Any:
    if spec is None or not hasattr(spec, "shape"):
        raise TunerError(f"an input spec must be a paddle.static.InputSpec, not {spec!r}")
    return paddle.static.InputSpec(list(spec.shape), spec.dtype, spec.name or default, stop_gradient=True)
