"""Tracing a Layer by running its Python as it is: what Paddle is changed in meanwhile, and what an error says."""

from __future__ import annotations

import functools
import linecache
import math
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddle_rbt_plugin.completion.distributed_ops import without_call_stacks
from paddle_rbt_plugin.errors import TunerError, TunerWarning, UnsupportedProgram, error_message
from paddle_rbt_plugin.handover.pir.balanced_load import BalancedLoad
from paddle_rbt_plugin.patching import Attribute, Setting, paddle_change


@contextmanager
def natively() -> Iterator[None]:
    """The context in which ``to_static`` runs the Python of a Layer as it is."""
    with ExitStack() as stack:
        changes = (native_tracing, traces_record_apart, errors_as_raised, values_are_viewed, flags_of_devices_are_off)
        for change in changes:
            stack.enter_context(change.apply())
        stack.enter_context(without_call_stacks())
        yield


@paddle_change(">=3.0,<3.4")
def native_tracing() -> Iterator[Setting]:
    """Lets the Python of a Layer run as it is while ``to_static`` traces it.

    Reason: dy2static transcribes every function it meets, which takes up to minutes for models from packages and can end in
    RecursionError. Only a model whose Python branches on the value of a tensor needs the transcription.
    """
    from paddle.jit import dy2static

    yield Attribute(dy2static, "Call", lambda function: function)


@paddle_change(">=3.0,<3.4")
def traces_record_apart() -> Iterator[Setting]:
    """Lets each trace record the parameters it meets, and what is changed in place, in a place of its own.

    Reason: Paddle keeps these records by the address of the program and drops them at the end of a trace, unless the trace
    fails. A later program at the same address then gets parameters of one that is gone, and the process ends.
    """
    records = trace_records()
    yield Attribute(records._global_parameter_recorder, "params_dict", {})
    yield Attribute(records._global_parameter_recorder, "tensor2value", {})
    yield Attribute(records._global_inplace_map, "params_dict", {})


def trace_records() -> Any:
    """Paddle's module that holds the records of traces."""
    try:
        from paddle.jit.dy2static import parameter_recorder
    except ImportError:  # before 3.3
        from paddle.jit.pir_dy2static import parameter_recorder
    return parameter_recorder


@paddle_change(">=3.0,<3.4")
def values_are_viewed() -> Iterator[Setting]:
    """Lets ``view`` of a value be its ``reshape``.

    Reason: Paddle refuses views outside dygraph, where they save a copy; a program has no need of them.
    """
    from paddle.tensor import manipulation

    original = manipulation.view

    @functools.wraps(original)
    def view(x: Any, *wanted: Any, **named: Any) -> Any:
        if not isinstance(x, paddle.pir.Value):
            return original(x, *wanted, **named)
        shape = wanted or (named.get("shape_or_dtype", named.get("shape", named.get("size", named.get("dtype")))),)
        if len(shape) == 1 and isinstance(shape[0], (list, tuple)):
            shape = tuple(shape[0])
        elif len(shape) == 1 and not isinstance(shape[0], (int, paddle.pir.Value)):
            return paddle._C_ops.view_dtype(x, paddle.base.framework.convert_np_dtype_to_dtype_(shape[0]))
        return paddle.reshape(x, list(shape))

    for owner in (paddle, paddle.tensor, manipulation, paddle.pir.Value):
        yield Attribute(owner, "view", view)


@paddle_change(">=3.0,<3.4")
def flags_of_devices_are_off() -> Iterator[Setting]:
    """Lets a model read a flag that only builds for other devices have: it is off.

    Reason: ``Flag FLAGS_cudnn_deterministic cannot get its value through this function`` ends the trace of a model that asks.
    """
    original = paddle.get_flags

    @functools.wraps(original)
    def get_flags(flags: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in [flags] if isinstance(flags, str) else flags:
            try:
                found |= original(name)
            except ValueError:
                found[name] = 2 if name == "FLAGS_flash_attn_version" else False
        return found

    yield Attribute(paddle, "get_flags", get_flags)
    yield Attribute(paddle.base.framework, "get_flags", get_flags)


@paddle_change(">=3.0,<3.4")
def values_as_balanced(load: BalancedLoad) -> Iterator[Setting]:
    """Gives a model that chooses experts by value the values of a balanced load: the truth of a condition, counts, and the
    coordinates of the tokens of an expert, as many as it would get.

    Reason: a program has no values while it is built. ``load`` notes where tokens were dispatched; such a program is planned,
    never run.
    """
    value = paddle.pir.Value
    originals = {name: getattr(value, name) for name in ("__bool__", "__int__", "__float__", "item", "tolist", "numpy")}

    def asked(name: str, read: Callable[[float], Any]) -> Callable[..., Any]:
        @functools.wraps(originals[name])
        def method(self: Any, *args: Any) -> Any:
            found = None if args else load.number(self)
            return originals[name](self, *args) if found is None else read(found)

        return method

    def listed(name: str, read: Callable[[list[int]], Any]) -> Callable[..., Any]:
        @functools.wraps(originals[name])
        def method(self: Any, *args: Any) -> Any:
            exact = _exact(self)
            found = exact.tolist() if exact is not None else load.numbers(self)
            return originals[name](self, *args) if found is None else read(found)

        return method

    def each(self: Any) -> Iterator[Any]:
        """The rows: numbers where they are known."""
        exact = _exact(self)
        if exact is not None:
            yield from exact.view(_Known)
        elif not self.shape or self.shape[0] < 0:
            raise TypeError(f"a tensor of shape {list(self.shape)} has no known number of rows")
        else:
            for i in range(self.shape[0]):
                yield self[i]

    load_constants: dict[int, np.ndarray] = {}

    def _exact(of: Any) -> np.ndarray | None:
        shape = list(of.shape)
        while of.id not in load_constants:
            op = of.get_defining_op()
            source = op.operand_source(0) if op is not None and op.name() in _PASSED_ON and op.num_operands() else None
            if source is None or math.prod(source.shape) != math.prod(shape):
                return None
            of = source
        return load_constants[of.id].reshape(shape)

    find, select = paddle._C_ops.nonzero, paddle._C_ops.masked_select

    def nonzero(condition: Any, *rest: Any, **named: Any) -> Any:
        wanted = load.places(condition) if isinstance(condition, value) else None
        if wanted is None:
            return find(condition, *rest, **named)
        if not wanted.groups:
            numbers = np.stack(np.unravel_index(np.arange(math.prod(condition.shape)), condition.shape), -1)
            made = paddle.assign(numbers)
            load_constants[made.id] = numbers
            return made
        if condition.id in load.dispatches:
            return load.dispatches[condition.id][1]
        flat = paddle.reshape(paddle.cast(condition, "float32"), [-1])
        rest_of = paddle.topk(flat, wanted.count)[1]
        coordinates = []
        for size in reversed(condition.shape[1:]):
            coordinates.append(rest_of % size)
            rest_of = rest_of // size
        made = paddle.stack([rest_of, *reversed(coordinates)], axis=-1)
        load.dispatches[condition.id] = condition, made, wanted
        return made

    def masked_select(x: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        wanted = load.places(mask) if isinstance(mask, value) else None
        if wanted is None or list(x.shape) != list(mask.shape):
            return select(x, mask, *rest, **named)
        return paddle.gather_nd(x, nonzero(mask))

    yield Attribute(value, "__bool__", asked("__bool__", lambda number: number >= 0.5))
    yield Attribute(value, "__int__", asked("__int__", math.ceil))
    yield Attribute(value, "__float__", asked("__float__", float))
    yield Attribute(value, "item", asked("item", lambda number: math.ceil(number) if number >= 1 else number))
    yield Attribute(value, "tolist", listed("tolist", list))
    yield Attribute(value, "numpy", listed("numpy", np.array))
    yield Attribute(value, "__iter__", each)
    yield Attribute(paddle._C_ops, "nonzero", nonzero)
    yield Attribute(paddle._C_ops, "masked_select", masked_select)


class _Known(np.ndarray):
    """Known numbers, where the model expects a tensor."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return int(found) if isinstance(found, np.integer) else found  # Paddle indexes with numbers of Python only

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))


_PASSED_ON = frozenset(
    f"pd_op.{name}" for name in ("slice", "assign", "cast", "share_data_", "reshape", "flatten", "squeeze", "unsqueeze")
)


@paddle_change(">=3.0,<3.4")
def engines_trace_natively() -> Iterator[Setting]:
    """Lets an engine run the Python of its model as it is while it builds a program, and transcribe it only if that fails.

    Reason: as for ``native_tracing``: what ``rbt.tune`` traces, ``dist.to_static`` and ``auto.Engine`` have to trace.
    """
    from paddle.distributed.auto_parallel.static.helper import ProgramHelper

    original = ProgramHelper.build_program

    @functools.wraps(original)
    def build_program(helper: Any, mode: str) -> Any:
        proxy, name = helper.proxy_layer, f"_{mode}"
        before = vars(proxy).get(name)
        try:
            with natively():
                return original(helper, mode)
        except TunerError:
            raise
        except (Exception, SystemExit) as error:  # the model's own Python may raise anything
            native_error = error
        helper.build_info.states[mode] = False  # it counts as built since it was begun
        proxy.__dict__.pop(name, None)
        if before is not None:
            vars(proxy)[name] = before
        warn_of_transcription(native_error)
        try:
            with traces_record_apart.apply(), errors_as_raised.apply():
                return original(helper, mode)
        except TunerError:
            raise
        except (Exception, SystemExit) as error:
            raise untraceable(proxy.inner_layer, native_error, error) from native_error

    yield Attribute(ProgramHelper, "build_program", build_program)


def warn_of_transcription(error: BaseException) -> None:
    """Says that a Layer is traced a second time, and why."""
    cause = cause_of(error)
    words = f"tracing without transcription failed ({cause}); trying again with Paddle's dy2static"
    warnings.warn(words, TunerWarning, stacklevel=5)


def untraceable(layer: Any, native_error: BaseException, error: BaseException) -> UnsupportedProgram:
    """The error for a Layer that could be traced neither as it is nor transcribed; the first cause comes first."""
    cause = cause_of(native_error)
    retried = "" if isinstance(error, RecursionError) else cause_of(error)
    also = f"; transcribed by Paddle's dy2static: {retried}" if retried not in ("", cause) else ""
    return UnsupportedProgram(f"the Layer {type(layer).__name__} cannot be traced: {cause}{also}")


@paddle_change(">=3.0,<3.4")
def errors_as_raised() -> Iterator[Setting]:
    """Lets an error that ends a trace arrive as the model or Paddle raised it.

    Reason: dy2static raises an error of its own in its place, without the lines of the model where its Python ran as it is.
    """
    from paddle.jit.dy2static import error

    yield Attribute(error, "DEFAULT_DISABLE_NEW_ERROR", 1)


_OTHER_THAN_MODELS = tuple(
    f"{folder}{os.sep}" for folder in (Path(paddle.__file__).parent, Path(__file__).parents[2], Path(os.__file__).parent)
)
_PACKAGES = f"{os.sep}site-packages{os.sep}"
_LONGEST = 500


def cause_of(error: BaseException) -> str:
    """What went wrong in a trace: the message of the error without stacks and advice, and the line of the model that led to
    it."""
    text = error_message(error)
    text = text.rpartition("Error Message Summary:")[2]
    lines = [line.strip() for line in text.strip(" -\n").splitlines()]
    told: list[str] = []
    for line in lines:
        if line.startswith(("In transformed code", "File ", "---", ">>>", "If you haven't", "There are two", "[operator <")):
            if told:
                break
            continue
        told += [line] if line else []
    message = " ".join(told).partition(" (at ")[0]
    message = message if len(message) <= _LONGEST else message[:_LONGEST] + "..."
    kind = type(error).__name__
    message = message if message.startswith(kind) else f"{kind}: {message}".rstrip(": ")
    frames = [f for f in traceback.walk_tb(error.__traceback__) if _is_of_model(f[0].f_code.co_filename)]
    if not frames:
        return message
    frame, number = frames[-1]
    path = frame.f_code.co_filename
    source = linecache.getline(path, number).strip()
    where = f"{path}:{number}, in {frame.f_code.co_name}"
    return f"{message} [{where}{f': {source}' if source else ''}]"


def _is_of_model(path: str) -> bool:
    inside = next((folder for folder in _OTHER_THAN_MODELS if path.startswith(folder)), None)
    return not path.startswith("<") and (inside is None or _PACKAGES in path[len(inside) - 1 :])
