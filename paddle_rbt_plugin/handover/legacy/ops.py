"""Gives back the ops that newer versions of Paddle cannot put into legacy programs.

From 3.2 on, ``paddle.matmul`` and, from 3.3 on, many others go straight to ``paddle._C_ops``, which takes eager tensors and
PIR values only. The kernels and their legacy op descriptions are still there, so a stand-in appends the op by name.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from paddle_rbt_plugin.patching import Attribute, Setting, paddle_change

_UNARY = (
    "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "exp", "floor", "log", "log1p", "log2", "log10", "round", "rsqrt",
    "sigmoid", "sign", "sin", "sinh", "sqrt", "tanh", "logical_not",
)  # fmt: skip
_BINARY = {"multiply": "elementwise_mul", "maximum": "elementwise_max", "minimum": "elementwise_min"}
_LOGICAL = ("greater_than", "logical_and", "logical_or", "logical_xor")
_COMPOSED = ("rms_norm", "swiglu", "scaled_dot_product_attention")


@contextlib.contextmanager
def legacy_static_ops() -> Iterator[None]:
    """While it is entered, the ops of GPT- and LLaMA-style models work in legacy programs on Paddle 3.2 and newer.

    Tensors of every other kind keep Paddle's own functions, and so does every Paddle that still has these ops; on leaving,
    everything is as it was. Nested use is fine. Functions that a module bound by name before (``from paddle import matmul``)
    work too, as they call ``paddle._C_ops`` late."""
    with ops_in_legacy_programs.apply():
        yield


def _lost_ops() -> bool:
    """Whether this Paddle has sunk ops below the legacy IR: there its ``matmul`` method is a builtin."""
    from paddle.base.framework import Variable

    return inspect.isbuiltin(getattr(Variable, "matmul", None)) or inspect.isbuiltin(getattr(Variable, "bmm", None))


@paddle_change(">=3.2,<3.4", lacking=_lost_ops)
def ops_in_legacy_programs() -> Iterator[Setting]:
    """Appends ops to legacy programs by name where Paddle's functions take eager tensors and PIR values only.

    Reason: ``Value`` is expected, ``but got Variable``, from ``paddle.matmul`` and the like.
    """
    import paddle
    from paddle.base.framework import Variable

    packages = ("paddle.tensor", "paddle.nn.functional")
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(packages)]
    for name, stand_in in _stand_ins().items():
        original = getattr(paddle._C_ops, name, None)
        if original is None:
            continue
        yield Attribute(paddle._C_ops, name, _dispatching(original, stand_in))
        for owner in (*modules, Variable):
            bound = vars(owner).get(name)
            if bound is original and inspect.isbuiltin(bound):
                yield Attribute(owner, name, _dispatching(bound, stand_in))
    functional = paddle.nn.functional
    for name in _COMPOSED:
        original = getattr(functional, name, None)
        if original is not None:
            yield Attribute(functional, name, _dispatching(original, globals()[f"_{name}"]))


def _dispatching(original: Callable, stand_in: Callable) -> Callable:
    from paddle.base.framework import Variable

    @functools.wraps(stand_in)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        legacy = any(isinstance(value, Variable) for value in (*args, *kwargs.values()))
        return (stand_in if legacy else original)(*args, **kwargs)

    return dispatch


def _append(type_: str, inputs: dict[str, Any], attrs: dict[str, Any] | None = None, dtype: Any = None) -> Any:
    from paddle.base.layer_helper import LayerHelper

    helper = LayerHelper(type_)
    out = helper.create_variable_for_type_inference(dtype or next(iter(inputs.values())).dtype)
    helper.append_op(type=type_, inputs=inputs, outputs={"Out": out}, attrs=attrs or {})
    return out


def _stand_ins() -> dict[str, Callable]:
    table: dict[str, Callable] = {name: functools.partial(_unary, name) for name in _UNARY}
    table |= {name: functools.partial(_binary, type_) for name, type_ in _BINARY.items()}
    table |= {name: functools.partial(_logical, name) for name in _LOGICAL}
    table |= {"matmul": _matmul, "bmm": _bmm, "gelu": _gelu, "sum": _sum, "expand_as": _expand_as}
    return table | {"tril": functools.partial(_triangle, True), "triu": functools.partial(_triangle, False)}


def _unary(type_: str, x: Any, name: str | None = None) -> Any:
    return _append(type_, {"X": x})


def _binary(type_: str, x: Any, y: Any, name: str | None = None) -> Any:
    return _append(type_, {"X": x, "Y": y}, {"axis": -1})


def _logical(type_: str, x: Any, y: Any, name: str | None = None) -> Any:
    return _append(type_, {"X": x, "Y": y}, dtype="bool")


def _matmul(x: Any, y: Any, transpose_x: bool = False, transpose_y: bool = False, name: str | None = None) -> Any:
    return _append("matmul_v2", {"X": x, "Y": y}, {"trans_x": transpose_x, "trans_y": transpose_y})


def _bmm(x: Any, y: Any, name: str | None = None) -> Any:
    return _append("bmm", {"X": x, "Y": y})


def _gelu(x: Any, approximate: bool | str = False, name: str | None = None) -> Any:
    return _append("gelu", {"X": x}, {"approximate": approximate in (True, "tanh")})


def _expand_as(x: Any, y: Any, name: str | None = None) -> Any:
    return _append("expand_as_v2", {"X": x, "Y": y}, {"target_shape": list(y.shape)})


def _sum(x: Any, axis: Any = None, dtype: Any = None, keepdim: bool = False, name: str | None = None) -> Any:
    if dtype is not None:
        x = x.astype(dtype)
    dims = [] if axis is None else [axis] if isinstance(axis, int) else list(axis)
    return _append("reduce_sum", {"X": x}, {"dim": dims, "keep_dim": keepdim, "reduce_all": not dims})


def _triangle(lower: bool, x: Any, diagonal: int = 0, name: str | None = None) -> Any:
    return _append("tril_triu", {"X": x}, {"diagonal": diagonal, "lower": lower})


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float = 1e-5, name: str | None = None) -> Any:
    import paddle

    axes = list(range(-(1 if isinstance(normalized_shape, int) else len(normalized_shape)), 0))
    inverse = paddle.rsqrt(paddle.mean(paddle.square(input), axis=axes, keepdim=True) + eps)
    out = input * inverse
    return (out if weight is None else out * weight), inverse


def _swiglu(x: Any, y: Any = None, name: str | None = None) -> Any:
    import paddle

    gate, up = paddle.chunk(x, 2, axis=-1) if y is None else (x, y)
    return paddle.nn.functional.silu(gate) * up


def _scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    training: bool = True,
    **_: Any,
) -> Any:
    import paddle

    q, k, v = (paddle.transpose(t, [0, 2, 1, 3]) for t in (query, key, value))
    scores = paddle.matmul(q * query.shape[-1] ** -0.5, k, transpose_y=True)
    if is_causal:
        scores = scores + paddle.triu(paddle.full(list(scores.shape[-2:]), -1e4, scores.dtype), 1)
    if attn_mask is not None:
        scores = scores + attn_mask
    weights = paddle.nn.functional.dropout(paddle.nn.functional.softmax(scores), dropout_p, training=training)
    return paddle.transpose(paddle.matmul(weights, v), [0, 2, 1, 3])
