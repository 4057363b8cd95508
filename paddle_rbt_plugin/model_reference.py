"""Resolves MODEL on the command line: from a name, a file or a function to a graph."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
from paddle.utils import unique_name

from paddle_rbt_plugin.errors import ModelError, TunerError, error_message
from paddle_rbt_plugin.graph import Graph, read_program
from paddle_rbt_plugin.handover.pir.configs import config_graph
from paddle_rbt_plugin.handover.pir.saved import load_program
from paddle_rbt_plugin.handover.pir.static_shapes import make_shapes_static
from paddle_rbt_plugin.handover.pir.trace import Trace, trace_layer, with_batch
from paddle_rbt_plugin.models import Config, build, config_names, input_spec, load_config, load_huggingface, named_config
from paddle_rbt_plugin.models.huggingface import is_huggingface

KINDS = (
    "the name of a published model, a config file (.yaml), a config.json of Hugging Face, a saved PIR program (.json), "
    "or package.module:function that returns a model"
)
_RESULT = (
    "a static Program holding the forward pass with its loss, or a tuple (layer, input_spec) whose forward returns the loss, "
    "or (layer, input_spec, loss, labels_spec)"
)


def model_config(reference: str, seq: int | None = None) -> Config | None:
    """The config that MODEL names; None if it names something else. Raises ModelError for ``seq`` without a config."""
    if reference in config_names() or reference.endswith((".yaml", ".yml")):
        config = named_config(reference) if reference in config_names() else load_config(reference)
        return dataclasses.replace(config, seq=seq) if seq is not None else config
    if reference.endswith(".json") and is_huggingface(reference):
        return load_huggingface(reference, seq)
    if seq is not None:
        raise ModelError(f"--seq changes the sequence length of a config, but {reference!r} is none: its inputs fix the length")
    return None


def model_graph(reference: str, batch: int, seq: int | None = None) -> Graph:
    """The forward graph of MODEL with its loss, traced on ``batch`` samples; nothing is allocated.

    ``seq`` replaces the sequence length of a config. A saved program keeps the batch that it was traced on. Raises ModelError
    for a reference that cannot be resolved, and suggests the nearest ones."""
    config = model_config(reference, seq)
    return config_graph(config, batch) if config is not None else _trace(reference, batch).graph


def model_trace(reference: str, batch: int, seq: int | None = None) -> Trace:
    """Like ``model_graph``, but with the program itself: a config is traced with all of its layers, which takes seconds per
    layer."""
    config = model_config(reference, seq)
    if config is None:
        return _trace(reference, batch)
    with unique_name.guard(), paddle.LazyGuard():
        layer = build(config)
    return trace_layer(layer, input_spec(config, batch))


def _trace(reference: str, batch: int) -> Trace:
    if ":" in reference:
        return _function_trace(reference, batch)
    if reference.endswith(".py"):
        module = ".".join(Path(reference).with_suffix("").parts)
        raise ModelError(f"{reference!r} is a Python file; name the function in it that returns the model, as {module}:build")
    if reference.endswith(".json") or Path(reference).is_file():
        return _read(load_program(reference))
    raise ModelError(_unknown(reference))


def _read(program: Any) -> Trace:
    make_shapes_static(program)
    return Trace(program, read_program(program))


def _unknown(reference: str) -> str:
    near = difflib.get_close_matches(reference, config_names(), 3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the published ones are {', '.join(config_names())}"
    return f"no model is named {reference!r}; {hint} (MODEL is {KINDS})"


def _function_trace(reference: str, batch: int) -> Trace:
    function = _find_function(reference)
    try:
        made = _call(function)
    except TunerError:
        raise
    except (Exception, SystemExit) as error:  # the user's own code may raise anything
        raise ModelError(f"{reference} raised {_first_line(error)}") from error
    if hasattr(made, "global_block"):
        return _read(made)
    layer, specs, loss, labels = model_parts(reference, made)
    specs, labels, samples = with_batch(specs, labels, batch)
    return trace_layer(layer, specs, loss, labels, samples)


def _call(function: Callable[[], Any]) -> Any:
    """The result of the function, built lazily. Dynamic mode is restored afterwards, whichever mode the function enabled."""
    try:
        with paddle.LazyGuard():
            return function()
    except AssertionError:
        # LazyGuard is for Layers only. A function that builds a static Program, which allocates nothing anyway, fails on it.
        if paddle.in_dynamic_mode():
            raise
        return function()
    finally:
        paddle.disable_static()


def _find_function(reference: str) -> Callable[[], Any]:
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise ModelError(f"{reference!r} is not of the form package.module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules of the current directory, as with python -m
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise ModelError(
                f"there is no module {error.name!r} in the current directory or the Python environment ({reference!r})"
            ) from error
        raise ModelError(f"importing {module_name} raised {_first_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise ModelError(f"importing {module_name} raised {_first_line(error)}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [n for n in dir(found) if callable(getattr(found, n))], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ModelError(f"{module_name} has no function {name!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise ModelError(f"{reference} is {type(found).__name__}, not a function; it would return {_RESULT}")
    return found


def model_parts(reference: str, made: Any) -> tuple[Any, Any, Any, Any]:
    """Layer, input specs, loss and label specs that a function returned. Raises ModelError for anything else."""
    if isinstance(made, paddle.nn.Layer):
        raise ModelError(
            f"{reference} returns a Layer alone, so the shapes of its inputs are unknown; it should return {_RESULT}"
        )
    if not isinstance(made, (tuple, list)) or not 2 <= len(made) <= 4 or not isinstance(made[0], paddle.nn.Layer):
        what = f"a tuple of {len(made)}" if isinstance(made, (tuple, list)) else type(made).__name__
        raise ModelError(f"{reference} returns {what}; it should return {_RESULT}")
    layer, specs, loss, labels = (*list(made), None, None)[:4]
    return layer, _as_list(specs), loss, _as_list(labels)


def _as_list(specs: Any) -> list[Any]:
    if specs is None:
        return []
    return list(specs) if isinstance(specs, (tuple, list)) else [specs]


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in error_message(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
