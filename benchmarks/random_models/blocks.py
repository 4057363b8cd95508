"""The blocks of the grammar: what each takes, gives, and can choose from. Its Layer, of the same name, is in ``layers`` or
``transformer``. The first choice of an attribute is the simplest, to which shrinking turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Value(NamedTuple):
    """What a statement makes: ``ids`` [length], ``seq`` [length, width], ``vec`` [width], ``img`` [channels, rows, columns],
    ``mask`` [1, length, length]; the batch goes before each."""

    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """``takes`` are the kinds of its operands (several for one: ``seq|vec``); ``gives`` the value made of attributes and
    operands, None where it does not apply; ``weight`` how often it is drawn, 0 where something else draws it."""

    takes: tuple[str, ...]
    gives: Callable[..., Value | None]
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    weight: float = 1.0
    divides: bool = False
    """Whether a plan divides its parameters along mp: only models with such a block are drawn for mp."""


BLOCKS: dict[str, Block] = {}


def _block(
    name: str, takes: str, gives: Callable[..., Value | None], weight: float = 1.0, divides: bool = False, **choices: Any
) -> None:
    BLOCKS[name] = Block(tuple(takes.split()), gives, choices, weight, divides)


def _same(at: dict[str, Any], x: Value, *_: Value) -> Value:
    return x


def _alike(at: dict[str, Any], x: Value, y: Value) -> Value | None:
    return x if x == y else None


def _wide(x: Value, width: int) -> Value:
    return Value(x.kind, (*x.shape[:-1], width))


def _heads(at: dict[str, Any], x: Value, *others: Value) -> Value | None:
    fits = x.shape[-1] % at["heads"] == 0 and at["heads"] % at.get("kv_heads", 1) == 0
    return x if fits and all(o.shape[-1] == x.shape[-1] for o in others) else None


def _attended(at: dict[str, Any], x: Value, y: Value) -> Value | None:
    return _heads(at, x, y)


def _masked(at: dict[str, Any], x: Value, mask: Value) -> Value | None:
    return _heads(at, x) if mask.shape == (1, x.shape[0], x.shape[0]) else None


def _halved(at: dict[str, Any], x: Value) -> Value | None:
    parts = at.get("parts", 2)
    return _wide(x, x.shape[-1] // parts) if x.shape[-1] % parts == 0 and x.shape[-1] // parts >= 4 else None


def _joined(at: dict[str, Any], x: Value, y: Value) -> Value | None:
    if x.kind != y.kind or x.shape[:-1] != y.shape[:-1]:
        return None
    return _wide(x, x.shape[-1] + y.shape[-1]) if x.shape[-1] + y.shape[-1] <= 64 else None


def _appended(at: dict[str, Any], x: Value, y: Value) -> Value | None:
    if x.shape[1] != y.shape[1] or x.shape[0] + y.shape[0] > 32:
        return None
    return Value("seq", (x.shape[0] + y.shape[0], x.shape[1]))


def _stacked(at: dict[str, Any], x: Value, y: Value) -> Value | None:
    if x != y:
        return None
    return (
        _wide(x, 2 * x.shape[-1]) if at["then"] == "reshape" and x.shape[-1] <= 32 else None if at["then"] == "reshape" else x
    )


def _pooled(at: dict[str, Any], x: Value) -> Value:
    return Value("vec", (x.shape[-1],))


def _convolved(at: dict[str, Any], x: Value) -> Value | None:
    rows = x.shape[1] // at["stride"]
    rows //= 2 if at["pool"] != "none" else 1
    return Value("img", (at["channels"], rows, rows)) if rows >= 2 else None


def _patches(at: dict[str, Any], x: Value) -> Value | None:
    if x.shape[1] % at["patch"]:
        return None
    count = (x.shape[1] // at["patch"]) ** 2 + int(at["class_token"])
    return Value("seq", (count, at["width"]))


def _flat(at: dict[str, Any], x: Value) -> Value | None:
    size = 1
    for n in x.shape:
        size *= n
    return Value("vec", (size,)) if size <= 512 else None


ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid")
YES = (True, False)
NO = (False, True)

# Inputs. Their attributes are drawn with the sizes of a case.
_block("tokens", "", lambda at: Value("ids", (at["length"],)), 0, words=(32, 64, 48, 50), length=(8, 6, 12))
_block("features", "", lambda at: Value("seq", (at["length"], at["width"])), 0, length=(8, 6, 12), width=(16, 32))
_block("table", "", lambda at: Value("vec", (at["width"],)), 0, width=(16, 32))
_block("image", "", lambda at: Value("img", (at["channels"], at["rows"], at["rows"])), 0, channels=(3, 1, 4), rows=(8,))
_block("attention_mask", "", lambda at: Value("mask", (1, at["length"], at["length"])), 0, length=(8, 6, 12))

# From tokens and images.
_block(
    "embedding",
    "ids",
    lambda at, x: Value("seq", (x.shape[0], at["width"])),
    1,
    True,
    width=(16, 32),
    scale=(1, 4, 0.5),
    positions=("none", "arange", "slice", "parameter"),
    types=NO,
    padding_idx=NO,
    spelt=("layer", "functional"),
)
_block("patch_embedding", "img", _patches, 1, width=(16, 32), patch=(4, 2), class_token=NO, positions=NO)

# Norms and maps of the last dimension.
_block("layer_norm", "seq|vec", _same, 2, spelt=("layer", "functional", "no_bias", "plain", "composed"))
_block("rms_norm", "seq|vec", _same, 2, spelt=("pow", "square", "product", "divide", "sqrt_of_sum"))
_block(
    "linear",
    "seq|vec",
    lambda at, x: _wide(x, at["width"]),
    2,
    width=(16, 32, 64),
    bias=YES,
    spelt=("layer", "functional", "matmul", "transposed"),
    activation=("none", *ACTIVATIONS),
)
_block("low_rank", "seq|vec", _same, 0.5, rank=(4, 2))
_block("scale", "seq|vec", _same, 0.5, bias=NO)
_block(
    "elementwise", "seq|vec|img", _same, 1, how=(*ACTIVATIONS, "softmax", "half", "square", "abs", "clip", "minus", "normalize")
)
_block("dropout", "seq|vec", _same, 0.7, p=(0.0,))

# Transformer blocks.
_block(
    "attention",
    "seq",
    _heads,
    3,
    True,
    heads=(4, 2, 8),
    kv_heads=(4, 1, 2),
    norm=("none", "layer", "rms"),
    bias=YES,
    residual=YES,
    project=("separate", "fused_split", "fused_reshape", "fused_slice"),
    core=("composed", "sdpa", "scaled_query"),
    causal=NO,
    expand=("repeat_interleave", "expand", "tile"),
    rotary=NO,
)
_ATTENTION: dict[str, Any] = {
    "heads": (4, 2),
    "norm": ("none", "layer", "rms"),
    "bias": YES,
    "residual": YES,
    "project": ("separate", "fused_split"),
    "core": ("composed", "sdpa"),
}
"""The choices of attention with a second operand."""
_block("masked_attention", "seq mask", _masked, 1, True, **_ATTENTION)
_block("cross_attention", "seq seq", _attended, 1.5, True, **_ATTENTION)
_block(
    "feed_forward",
    "seq|vec",
    _same,
    3,
    True,
    factor=(4, 2, 3),
    activation=ACTIVATIONS,
    norm=("none", "layer", "rms", "after"),
    gate=("none", "separate", "fused_chunk", "fused_slice"),
    bias=YES,
    residual=YES,
)
_block("parallel_block", "seq", _heads, 1, True, heads=(4, 2), activation=ACTIVATIONS, norm=("layer", "rms"), bias=YES)
_block(
    "transformer_layer",
    "seq",
    _heads,
    1.5,
    True,
    heads=(4, 2),
    kv_heads=(4, 2),
    norm=("layer", "rms"),
    activation=ACTIVATIONS,
    gate=("none", "separate", "fused_chunk"),
    bias=YES,
    project=("separate", "fused_split"),
    core=("composed", "sdpa"),
    causal=NO,
)
_block("token_mixer", "seq", _same, 0.7, activation=("gelu", "relu"), residual=YES)
_block("per_head_scale", "seq", _heads, 0.5, heads=(4, 2), norm=NO)

# Data movement.
_block("add", "seq|vec|img seq|vec|img", _alike, 2, how=("add", "subtract", "multiply", "maximum"))
_block("concat", "seq|vec seq|vec", _joined, 2)
_block("append", "seq seq", _appended, 1)
_block("stack", "seq|vec seq|vec", _stacked, 1.5, then=("sum", "mean", "index", "max", "reshape"), axis=(1, 0))
_block("split", "seq|vec", _halved, 1, parts=(2, 4), then=("first", "last", "sum", "product", "glu"))
_block("swap_halves", "seq|vec", lambda at, x: x if x.shape[-1] % 2 == 0 else None, 0.7, spelt=("split", "slice", "roll"))
_block("slice", "seq|vec", _halved, 1, part=("first", "last"))
_block(
    "cut",
    "seq",
    lambda at, x: Value("seq", (x.shape[0] // 2, x.shape[1])) if x.shape[0] >= 4 else None,
    0.7,
    part=("first", "last", "strided"),
)
_block("broadcast", "seq vec", lambda at, x, y: x if x.shape[-1] == y.shape[-1] else None, 1.5, how=("add", "multiply"))
_block("einsum", "seq|vec", lambda at, x: _wide(x, at["width"]), 0, width=(16, 32))

# To one vector per sample.
_block("pool", "seq", _pooled, 1.5, how=("mean", "sum", "first", "last", "max", "weighted"))
_block("flatten", "seq|img", _flat, 0.7, spelt=("flatten", "reshape"))

# Images.
_block(
    "conv",
    "img",
    _convolved,
    3,
    channels=(4, 8),
    kernel=(3, 1),
    stride=(1, 2),
    norm=("none", "batch"),
    activation=("relu", "none", "silu"),
    pool=("none", "max", "avg"),
    bias=YES,
)
_block("image_pool", "img", lambda at, x: Value("vec", (x.shape[0],)), 1.5, spelt=("mean", "adaptive"))

# Heads: what a loss reads.
_block(
    "head",
    "seq|vec",
    lambda at, x: _wide(x, at["width"]),
    0,
    width=(4, 32, 64),
    bias=YES,
    spelt=("layer", "functional", "matmul"),
)
_block("tied_head", "seq", lambda at, x: _wide(x, at["words"]), 0, words=(32, 64, 48, 50), spelt=("matmul", "linear"))

INPUTS = ("tokens", "features", "table", "image", "attention_mask")
STACKED = ("attention", "feed_forward", "parallel_block", "transformer_layer")
"""Blocks of which a statement may hold several with weights of their own, in a LayerList."""
CRASHING = ("einsum",)
"""Blocks that may end the process today."""
WITHOUT_WEIGHTS = (
    *INPUTS,
    "elementwise",
    "dropout",
    "add",
    "concat",
    "append",
    "stack",
    "split",
    "swap_halves",
    "slice",
    "cut",
    "broadcast",
    "flatten",
    "image_pool",
)
