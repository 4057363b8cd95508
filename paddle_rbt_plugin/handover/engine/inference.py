"""Writes the serial model of an engine for prediction, as ``paddle.jit.save`` does: ``PATH.json`` and ``PATH.pdiparams``."""

from __future__ import annotations

from typing import Any

import paddle
import paddle.distributed as dist

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.checkpoint.held import holder_of, named_tensors
from paddle_rbt_plugin.handover.checkpoint.store import converted
from paddle_rbt_plugin.handover.pir.engine_data import engine_specs
from paddle_rbt_plugin.handover.pir.engine_outputs import dygraph, whole


def save(engine: Any, path: str) -> None:
    """All ranks must call this; rank 0 writes, and needs memory for the whole model. The batch size is left open.

    Raises TunerError for an engine that does not know its inputs yet, and for the stages of a pipeline."""
    specs = next(iter(engine_specs(engine).values()), None)
    if specs is None:
        raise TunerError(
            "the engine does not know its inputs yet: call prepare, fit, evaluate or predict before saving its model"
        )
    held = {tensor.name: tensor for tensor in holder_of(engine, None).tensors() if "/" not in tensor.name}
    tensors = dict(named_tensors(engine._model))
    if missing := sorted(set(tensors) - set(held)):
        raise TunerError(
            f"{missing[0]} is held by another pipeline stage: save a checkpoint, and load it into the serial model"
        )
    values = {name: (whole(tensor.layout, tensor.read()), tensor.dtype) for name, tensor in held.items()}
    if dist.get_rank() != 0:
        return
    place = paddle.framework._current_expected_place_()
    emptied = [tensor for tensor in tensors.values() if not tensor._is_initialized()]
    modes = [(layer, layer.training) for layer in engine._model.sublayers(include_self=True)]
    try:
        with dygraph():
            for name, (value, dtype) in values.items():
                kind = str(tensors[name].dtype).rpartition(".")[2]
                tensors[name].get_tensor().set(converted(value, "float32" if dtype == "bfloat16" else dtype, kind), place)
            for layer, _ in modes:
                layer.training = False
            inputs = [paddle.static.InputSpec([None, *spec.shape[1:]], spec.dtype, spec.name) for spec in specs[0]]
            paddle.jit.save(paddle.jit.to_static(engine._model, input_spec=inputs, full_graph=True), path)
    finally:
        for layer, training in modes:
            layer.training = training
        for tensor in emptied:
            tensor.get_tensor()._clear()
