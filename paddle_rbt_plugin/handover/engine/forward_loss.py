"""Trains models whose ``forward`` returns the loss, so that ``auto.Engine`` and ``dist.to_static`` are given none.

Paddle expects a loss of outputs and labels. Without one it registers an empty list as the loss, which ends in an error, and it
takes one part of a sample for the input and one for the label, although such a forward reads both. Here ``forward`` receives as
many parts of a sample as it takes arguments, and its first output is the loss.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import paddle
from paddle.distributed.auto_parallel.static.engine import Engine

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.shared.strategy import is_enabled
from paddle_rbt_plugin.patching import ENGINES_OF_SCRIPTS, Attribute, Setting, paddle_change


@paddle_change(">=2.6,<3.4", permanent=ENGINES_OF_SCRIPTS)
def engine_finds_forward_loss() -> Iterator[Setting]:
    """Makes an engine without a loss use the first output of ``forward``.

    Reason: without a loss Paddle registers an empty list, which ends in an error.
    """
    build, spec = Engine._build, Engine._prepare_data_spec

    @functools.wraps(build)
    def build_with_loss(engine: Any, mode: str) -> Any:
        if mode != "predict" and _is_without_loss(engine):
            engine._loss = forward_loss
            labels = list(engine._labels_spec or ())
            if labels and _takes(engine._model, len(engine._inputs_spec) + len(labels)):
                engine._inputs_spec, engine._labels_spec = [*engine._inputs_spec, *labels], []
        return build(engine, mode)

    @functools.wraps(spec)
    def whole_sample_as_input(engine: Any, data: Any, split: int | None, *args: Any, **kwargs: Any) -> Any:
        if split is None and _is_without_loss(engine):
            sample = next(iter(data)) if isinstance(data, paddle.io.IterableDataset) else data[0]
            if isinstance(sample, (list, tuple)) and _takes(engine._model, len(sample)):
                split = len(sample)
        return spec(engine, data, split, *args, **kwargs)

    yield Attribute(Engine, "_build", build_with_loss)
    yield Attribute(Engine, "_prepare_data_spec", whole_sample_as_input)


@paddle_change(">=3.0,<3.4", permanent=ENGINES_OF_SCRIPTS)
def dist_model_finds_forward_loss() -> Iterator[Setting]:
    """Makes ``dist.to_static`` without a loss train the first output of ``forward``.

    Reason: for legacy programs ``DistModel`` trains only if it has a loss.
    """
    from paddle.distributed.auto_parallel import api

    original = api.DistModel.__init__

    @functools.wraps(original)
    def init(model: Any, layer: Any, loader: Any, loss: Any = None, optimizer: Any = None, strategy: Any = None, **rest: Any):
        if loss is None and optimizer is not None and is_enabled(getattr(strategy, "tuning", None)):
            loss = forward_loss
        original(model, layer, loader, loss, optimizer, strategy, **rest)

    yield Attribute(api.DistModel, "__init__", init)


def _is_without_loss(engine: Any) -> bool:
    tuned = is_enabled(engine._strategy.tuning) and not engine._skip_build
    return tuned and (engine._loss is None or engine._loss is forward_loss)


@paddle.jit.not_to_static
def forward_loss(*outputs: Any) -> Any:
    """The loss among the results of ``forward``, which labels that it did not take may follow: the first output, or ``loss`` of
    a dict.

    Raises TunerError if that is not a single number."""
    loss = outputs[0] if outputs else None
    if isinstance(loss, Mapping):
        loss = loss.get("loss")
    shape = getattr(loss, "shape", None)
    if shape is None or any(n != 1 for n in shape):
        found = "no tensor" if shape is None else f"a tensor of shape {list(shape)}"
        raise TunerError(
            f"no loss is given, so the first output of forward must be the loss, a single number, but it is {found}; pass a "
            "loss, or return it from forward"
        )
    return loss


def _takes(model: Any, arguments: int) -> bool:
    """Whether the forward function of a model accepts that many arguments."""
    try:
        inspect.signature(getattr(model, "forward", model)).bind(*[None] * arguments)
    except (TypeError, ValueError):  # too many of them, or a function whose signature cannot be read
        return False
    return True
