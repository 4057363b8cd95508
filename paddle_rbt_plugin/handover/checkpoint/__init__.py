"""Checkpoints that do not depend on a plan: saved under one plan, they can be loaded under any other and into the serial model.

A checkpoint is a folder. Each rank writes the parts of tensors that it owns to its own file (safetensors); ``index.json`` lists
the shape and type of every tensor and where its parts are, and holds the learning-rate schedule and the random state. A rank
that loads reads only what overlaps with its own parts. Tensors have the structured names of the Layer's ``state_dict``, such as
``blocks.0.up.weight``; optimizer states are named like ``blocks.0.up.weight/moment1``.

This is not the format of ``paddle.distributed.save_state_dict``, which stores its index and tensors as pickles (which can
execute code when they are loaded), names states by Paddle's counters, marks distributed tensors by a suffix, and can be loaded
only on GPUs. Loading a checkpoint of this format executes nothing. It is written next to its final path and moved there once
every rank has finished, so it is either complete or absent. The random state is stored as a seed: saving seeds all ranks from
it, so a run that continues and a run that is resumed draw the same numbers.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.checkpoint import randomness, schedules, store
from paddle_rbt_plugin.handover.checkpoint.held import Held, Holder, holder_of
from paddle_rbt_plugin.handover.pir.engine_programs import current

__all__ = ["load_checkpoint", "save_checkpoint"]


def save_checkpoint(
    path: str | os.PathLike[str], model: Any, optimizer: Any = None, *, extra: dict[str, Any] | None = None
) -> None:
    """Writes the folder ``path``, and replaces an existing one. All ranks must call this; the path of rank 0 is used.

    ``model`` is an ``auto.Engine``, the result of ``dist.to_static``, or a Layer, sharded or not, with its ``optimizer``.
    ``extra`` is stored as JSON, for example to count epochs.

    Raises TunerError if any rank cannot write, if ``model`` is something else, and if ``extra`` cannot be stored as JSON."""
    holder = holder_of(model, optimizer)
    described = {
        "optimizer": holder.optimizer_name,
        "schedule": schedules.state_of(holder.optimizer),
        "random": randomness.renewed(holder.engine, holder.model),
        "extra": schedules.plain(extra or {}, "extra"),
    }
    store.write(path, holder.tensors(), described)


def load_checkpoint(
    path: str | os.PathLike[str], model: Any, optimizer: Any = None, *, strict: bool = True, with_optimizer: bool = True
) -> dict[str, Any]:
    """Loads a checkpoint into a model, and into its optimizer if there is one; returns its ``extra``. All ranks must call this.

    An engine that is not prepared yet applies the parameters when its first program is made, and the rest with its training
    program. ``strict=False`` ignores entries that only one of the two has; ``with_optimizer=False`` ignores the optimizer of an
    engine.

    Raises TunerError for a damaged or incomplete checkpoint, and for one of another model or optimizer, naming the first
    difference."""
    index = store.read_index(path)
    holder = holder_of(model, optimizer)
    if not with_optimizer:
        holder = replace(holder, optimizer=None)
    _load(index, holder, strict)
    if holder.engine is not None and current(holder.engine, "train") is None:
        holder.engine.rule_based_checkpoint = (index, strict, with_optimizer)
    return dict(index.described["extra"])


def resume(engine: Any, mode: str) -> None:
    """Loads the checkpoint that an engine was given into a program that it has just prepared."""
    if pending := getattr(engine, "rule_based_checkpoint", None):
        index, strict, with_optimizer = pending
        holder = holder_of(engine, None)
        _load(index, holder if with_optimizer else replace(holder, optimizer=None), strict)
        if mode == "train":
            engine.rule_based_checkpoint = None


def _load(index: store.Index, holder: Holder, strict: bool) -> None:
    held = {tensor.name: tensor for tensor in holder.tensors()}
    wanted = holder.expected()
    saved = {name for name in index.tensors if "/" not in name or holder.has_states}
    _check(index, wanted, saved, strict)
    for name, tensor in held.items():
        if array := _value(index, tensor, name):
            tensor.write(array[0])
    if holder.optimizer is not None:
        schedules.restore(holder.optimizer, index.described["schedule"], index.path)
    randomness.restore(index.described["random"], holder.engine, holder.model)


def _check(index: store.Index, wanted: dict[str, tuple[int, ...]], saved: set[str], strict: bool) -> None:
    """Raises TunerError naming the first difference between a checkpoint and what should be loaded."""
    where = f"the checkpoint {str(index.path)!r} is of another model"
    for name, shape in wanted.items():
        if name not in index.tensors:
            parameter, _, kind = name.partition("/")
            if kind == "master" or not strict:  # made of the parameter
                continue
            if kind and not any("/" in other for other in index.tensors):
                raise TunerError(f"the checkpoint {str(index.path)!r} holds no optimizer states; load it without an optimizer")
            lacks = f"state {kind!r} of {parameter}: its optimizer is {index.described['optimizer']}" if kind else name
            raise TunerError(f"{where}: it lacks {lacks}")
        if index.tensors[name].shape != shape:
            raise TunerError(f"{where}: {name} has the shape {list(index.tensors[name].shape)} there and {list(shape)} here")
    others = sorted(name for name in saved - set(wanted) if not name.endswith("/master"))
    if others and strict:
        raise TunerError(f"{where}: it holds {others[0]}, which this model lacks")


def _value(index: store.Index, tensor: Held, name: str) -> tuple[Any] | None:
    """The value of this rank's part; that of the master weight if the parameter was saved in lower precision."""
    parameter, _, kind = name.partition("/")
    source = name if name in index.tensors else parameter if kind == "master" else None
    master = f"{parameter}/master"
    if not kind and master in index.tensors and tensor.dtype == "float32" and index.tensors[name].dtype != "float32":
        source = master
    if source is None or source not in index.tensors:
        return None
    return (store.converted(index.read(source, tensor.layout), index.tensors[source].dtype, tensor.dtype),)
