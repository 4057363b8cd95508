"""What a case may hold: blocks by name, what each takes and gives, and the choices of their attributes. No Paddle in here.

A case is plain data::

    {"sizes": {"batch": 8, "length": 8},
     "model": [{"op": "tokens", "in": [], "at": {"words": 32}},
               {"op": "embedding", "in": [0], "at": {"width": 16, ...}},
               {"op": "linear", "in": [1], "at": {...}, "of": 3}],        # the Layer of statement 3, used again
     "outputs": [{"value": 2, "loss": "cross_entropy", "at": {...}}],
     "total": {...}, "script": {...}, "layout": {"dp": 2, "mp": 1}, "entry": "to_static", "seed": 7}

The statements of a model are in order; ``in`` holds the indices of the statements whose values one reads. ``shapes`` infers the
kind and the shape of every value, without the batch, and raises ``Illegal`` for a case that is none. The first of the choices of
an attribute is the simplest, to which shrinking turns.

A new block is an entry of ``BLOCKS`` here and a Layer of the same name in ``layers``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Case = dict[str, Any]
Statement = dict[str, Any]


class Illegal(ValueError):
    """A case that cannot be built; says why."""


class Value(NamedTuple):
    """What a statement makes: ``ids`` [length], ``seq`` [length, width], ``vec`` [width], ``img`` [channels, rows, columns],
    ``mask`` [1, length, length]; the batch goes before each."""

    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """``takes`` the kinds of its operands (several for one: ``seq|vec``); ``gives`` the value that it makes of the attributes and
    the operands, None where it does not apply; ``weight`` how often it is drawn, 0 where something else draws it."""

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
_block("tokens", "", lambda at: Value("ids", (at["length"],)), 0, words=(32, 64, 48, 50), length=(8,))
_block("features", "", lambda at: Value("seq", (at["length"], at["width"])), 0, length=(8,), width=(16, 32))
_block("table", "", lambda at: Value("vec", (at["width"],)), 0, width=(16, 32))
_block("image", "", lambda at: Value("img", (at["channels"], at["rows"], at["rows"])), 0, channels=(3, 1, 4), rows=(8,))
_block("attention_mask", "", lambda at: Value("mask", (1, at["length"], at["length"])), 0, length=(8,))

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
_block(
    "masked_attention",
    "seq mask",
    _masked,
    1,
    True,
    heads=(4, 2),
    norm=("none", "layer", "rms"),
    bias=YES,
    residual=YES,
    project=("separate", "fused_split"),
    core=("composed", "sdpa"),
)
_block(
    "cross_attention",
    "seq seq",
    _attended,
    1.5,
    True,
    heads=(4, 2),
    norm=("none", "layer", "rms"),
    bias=YES,
    residual=YES,
    project=("separate", "fused_split"),
    core=("composed", "sdpa"),
)
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

LOSSES: dict[str, dict[str, Sequence[Any]]] = {
    "cross_entropy": {
        "form": (
            "plain",
            "layer",
            "none_mean",
            "half",
            "penalty",
            "mean_again",
            "sum_over_batch",
            "masked",
            "masked_sum",
            "smoothing_argument",
            "smoothing_labels",
            "soft_labels",
            "log_softmax",
            "softmax_with",
            "ignore_index",
        ),
    },
    "distance": {"form": ("mse", "l1", "smooth_l1", "square_mean", "half", "none_mean", "sum_over_batch", "penalty")},
}

SCRIPT: dict[str, Sequence[Any]] = {
    "optimizer": ("SGD", "Momentum", "AdamW", "Adam"),
    "schedule": ("none", "step", "warmup", "cosine"),
    "clip": ("none", "global_norm", "norm", "value"),
    "accumulate": (1, 2, 4),
    "recompute": ("none", "full", "selective"),
    "zero": (0, 1, 2),
    "decay": (0.0, 0.01),
    "steps": (1, 2, 3, 4),
}
LAYOUTS = {"dp2": (2, 1), "mp2": (1, 2), "dp4": (4, 1), "mp4": (1, 4), "dp2mp2": (2, 2)}
ENTRIES = ("to_static", "engine", "dygraph")


def shapes(case: Case) -> list[Value]:
    """The value of every statement. Raises Illegal."""
    values: list[Value] = []
    for i, s in enumerate(case["model"]):
        block = BLOCKS.get(s["op"])
        if block is None:
            raise Illegal(f"statement {i}: no block {s['op']!r}")
        if len(s["in"]) != len(block.takes) or any(not 0 <= j < i for j in s["in"]):
            raise Illegal(f"statement {i}: wrong operands {s['in']}")
        operands = [values[j] for j in s["in"]]
        if any(v.kind not in kinds.split("|") for v, kinds in zip(operands, block.takes, strict=True)):
            raise Illegal(f"statement {i}: {s['op']} does not take {[v.kind for v in operands]}")
        if set(s["at"]) != set(block.choices):
            raise Illegal(f"statement {i}: {s['op']} has the attributes {sorted(block.choices)}")
        value = block.gives(s["at"], *operands)
        if value is None:
            raise Illegal(f"statement {i}: {s['op']} does not apply to {operands}")
        if "of" in s:
            _check_shared(case, i, values)
        values.append(value)
    return values


def _check_shared(case: Case, i: int, values: list[Value]) -> None:
    """A Layer used twice reads the same shapes again; a tied head is that of an embedding as wide as what it reads."""
    s = case["model"][i]
    other = case["model"][s["of"]] if 0 <= s["of"] < i else None
    if s["op"] == "tied_head":
        if other is None or other["op"] != "embedding" or other["at"]["width"] != values[s["in"][0]].shape[-1]:
            raise Illegal(f"statement {i}: a head tied to no embedding of its width")
        if case["model"][other["in"][0]]["at"]["words"] != s["at"]["words"]:
            raise Illegal(f"statement {i}: a head tied to an embedding of other words")
        return
    alike = other is not None and other["op"] == s["op"] and other["at"] == s["at"] and "of" not in other
    if not alike or [values[j] for j in s["in"]] != [values[j] for j in other["in"]]:
        raise Illegal(f"statement {i}: shares the Layer of another block")


def check(case: Case) -> list[Value]:
    """``shapes``, and that the outputs, the script and the layout are legal. Raises Illegal."""
    values = shapes(case)
    if not case["outputs"]:
        raise Illegal("no output")
    for output in case["outputs"]:
        if not 0 <= output["value"] < len(values) or values[output["value"]].kind not in ("seq", "vec", "img"):
            raise Illegal("an output that is none")
        if output["form"] not in LOSSES[output["loss"]]["form"]:
            raise Illegal(f"no loss {output['form']!r}")
    for s in case["model"]:
        if s["op"] == "tied_head" and "of" not in s:
            raise Illegal("a tied head without an embedding")
    dp, mp = case["layout"]["dp"], case["layout"]["mp"]
    if case["sizes"]["batch"] % (dp * case["script"]["accumulate"]):
        raise Illegal("the batch cannot be divided")
    if dp > 1 and mp > 1 and case["entry"] != "dygraph":
        raise Illegal("static programs on CPUs run along one axis only")
    if case["script"]["zero"] and (dp == 1 or case["script"]["optimizer"] == "Momentum"):
        raise Illegal("nothing for ZeRO to divide")
    if not read(case) & {i for i, s in enumerate(case["model"]) if s["op"] in INPUTS[:4]}:
        raise Illegal("no input is read")
    if not any(_has_weights(case["model"][i]) for i in read(case)):
        raise Illegal("nothing to train")
    return values


def _has_weights(s: Statement) -> bool:
    without = s["op"] in WITHOUT_WEIGHTS or s["at"].get("spelt") == "plain"
    return not without and not (s["op"] == "pool" and s["at"]["how"] != "weighted")


def read(case: Case) -> set[int]:
    """The statements that an output depends on, as operand or through a shared Layer."""
    found: set[int] = set()
    todo = [o["value"] for o in case["outputs"]]
    while todo:
        i = todo.pop()
        if i not in found:
            found.add(i)
            s = case["model"][i]
            todo += [*s["in"], *([s["of"]] if "of" in s else [])]
    return found


def pruned(case: Case) -> Case:
    """The case without the statements that no output depends on."""
    kept = sorted(read(case))
    at = {old: new for new, old in enumerate(kept)}
    model = []
    for old in kept:
        s = dict(case["model"][old])
        s["in"] = [at[j] for j in s["in"]]
        if "of" in s:
            s["of"] = at[s["of"]]
        model.append(s)
    return {**case, "model": model, "outputs": [{**o, "value": at[o["value"]]} for o in case["outputs"]]}
