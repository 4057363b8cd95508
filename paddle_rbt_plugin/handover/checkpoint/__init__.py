"""Checkpoints that do not depend on a plan: saved under one, loaded under any other, and into the serial model.

A checkpoint is a folder. Each rank writes the parts of tensors that it owns to a file of its own (safetensors); ``index.json``
says of every tensor its shape, its type and where its parts are, and holds the learning-rate schedule and the random state. A
rank that loads reads what overlaps with its own parts. Tensors have structured names, ``blocks.0.up.weight``, which are those
of the Layer's ``state_dict``, whatever Paddle calls them; states of the optimizer are called ``blocks.0.up.weight/moment1``.

It is not the format of ``paddle.distributed.save_state_dict``: that keeps its index and its tensors as pickles, which execute
what they hold when they are loaded, names states by Paddle's counters, marks distributed tensors by a suffix, and is loaded on
GPUs only. Nothing is executed here.

A checkpoint is written next to its place and moved there when every rank has written all of it, so that there is either a whole
one or none. Random state is kept as a seed: saving seeds all ranks anew from it, so that a run that goes on and a run that is
resumed draw alike.
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
    """Writes the folder ``path``; one that is there already is replaced. All ranks call this; the path of rank 0 counts.

    ``model`` is an ``auto.Engine``, what ``dist.to_static`` returned, or a Layer, sharded by a plan or not, which goes with its
    ``optimizer``. ``extra`` is kept as JSON, for a count of epochs and the like.

    Raises TunerError where any rank cannot write, for something else than a model, and for an ``extra`` that is not JSON."""
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
    """Reads a checkpoint into a model, and into its optimizer where it has one; returns its ``extra``. All ranks call this.

    An engine that is not prepared yet takes the parameters when its first program is made, and the rest with that of training.
    ``strict=False`` leaves out what only one of the two has; ``with_optimizer=False`` the optimizer of an engine.

    Raises TunerError for a checkpoint that is damaged or not whole, and for one of another model or optimizer, with the first
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
    """Reads the checkpoint that an engine was given into a program that it has prepared just now."""
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
    """Raises TunerError with the first difference between a checkpoint and what is to be loaded."""
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
    """The value of this rank's part: that of the master weight where the parameter was saved in less precision."""
    parameter, _, kind = name.partition("/")
    source = name if name in index.tensors else parameter if kind == "master" else None
    master = f"{parameter}/master"
    if not kind and master in index.tensors and tensor.dtype == "float32" and index.tensors[name].dtype != "float32":
        source = master
    if source is None or source not in index.tensors:
        return None
    return (store.converted(index.read(source, tensor.layout), index.tensors[source].dtype, tensor.dtype),)
