"""What ``paddle.ParamAttr`` says of a parameter reaches the optimizer of a PIR program.

An optimizer reads a parameter's own learning rate, regularizer and exemption from clipping as attributes of the parameter. The
values of a PIR program that ``to_static`` traces lack them, and Paddle then takes the defaults without a word: another update
than that of the serial model. Groups of parameters with settings of their own are forgotten by the engine; they are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle.distributed.auto_parallel.static import utils

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.patching import Attribute, Setting, paddle_change

ATTRIBUTES = ("optimize_attr", "regularizer", "need_clip")
"""Those that an update reads. Whether a parameter is trained at all is traced: it is the value's ``stop_gradient``."""
_ENTRIES = ("_apply_optimize", "apply_gradients")
"""The methods through which the engine makes an update, the second in mixed precision."""


_GROUPS = "has_parameter_groups"
"""The attribute that an optimizer with groups is marked with."""


@paddle_change(">=3.0,<3.4", permanent="engines discard the groups on creation, before a tuner is requested")
def groups_remembered() -> Iterator[Setting]:
    """Lets optimizers remember that they have groups of parameters when an engine takes them.

    Reason: the engine empties the list of an optimizer's parameters, so that groups are ignored without a word.
    """
    original = utils.validate_opt

    @functools.wraps(original)
    def validate(optimizer: Any) -> Any:
        groups = getattr(optimizer, "_param_groups", None) or [None]
        if isinstance(groups[0], dict):
            setattr(optimizer, _GROUPS, True)
        return original(optimizer)

    yield Attribute(utils, "validate_opt", validate)


@contextmanager
def given(optimizer: Any, model: Any) -> Iterator[None]:
    """Lets ``optimizer``, while Paddle makes a program, find the attributes of the parameters of ``model``.

    The engine empties the optimizer's own list of parameters. Raises TunerError for an optimizer with groups."""
    if optimizer is None or not isinstance(model, paddle.nn.Layer):
        yield
        return
    if getattr(optimizer, _GROUPS, False):
        raise TunerError(
            "the optimizer has parameter groups, which Paddle's engine ignores; give it parameters=model.parameters(), and "
            "set what differs with paddle.ParamAttr (learning_rate, regularizer, need_clip) or with apply_decay_param_fun and "
            "lr_ratio of AdamW"
        )
    layers = model.sublayers(include_self=True)
    parameters = {p.name: p for layer in layers for p in layer._parameters.values() if p is not None}
    for entry in _ENTRIES:
        setattr(optimizer, entry, _with_attributes(getattr(optimizer, entry), parameters))
    try:
        yield
    finally:
        for entry in _ENTRIES:
            delattr(optimizer, entry)


def _with_attributes(method: Any, parameters: dict[str, Any]) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        for gradients in (*args, *kwargs.values()):
            for value, _ in gradients if isinstance(gradients, list) else ():
                copy(parameters.get(value.name), value)
        return method(*args, **kwargs)

    return call


def copy(parameter: Any, value: Any) -> None:
    """Gives the value of a program what the parameter of the Layer has. Does nothing for a value of no parameter (None)."""
    for name in ATTRIBUTES if parameter is not None else ():
        if hasattr(parameter, name):
            setattr(value, name, getattr(parameter, name))
