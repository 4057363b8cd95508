"""What a case is, and which cases are legal. Neither this module nor ``blocks`` needs Paddle.

A case is plain data::

    {"sizes": {"batch": 8},
     "model": [{"op": "tokens", "in": [], "at": {"words": 32, "length": 8}},
               {"op": "embedding", "in": [0], "at": {"width": 16, ...}},
               {"op": "linear", "in": [1], "at": {...}},
               {"op": "linear", "in": [2], "at": {...}, "of": 2}],
     "outputs": [{"value": 3, "loss": "cross_entropy", "form": "plain"}], "returned": False,
     "script": {...}, "layout": {"dp": 2, "mp": 1}, "entry": "to_static", "seed": 7}

The statements of a model are in order; ``in`` holds the indices of those whose values one reads, ``of`` the one whose Layer it
uses again (of a tied head: the embedding whose table it reads), ``times`` how many blocks of the kind follow one another. With
``returned``, ``forward`` takes the labels and returns the loss. The seed is that of weights and batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from random_models.blocks import BLOCKS, INPUTS, STACKED, WITHOUT_WEIGHTS, Value

Case = dict[str, Any]
Statement = dict[str, Any]


class Illegal(ValueError):
    """A case that cannot be built; says why."""


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
    "optimizer": (
        "SGD",
        "Momentum",
        "AdamW",
        "Adam",
        "AdamW",
        "Adagrad",
        "RMSProp",
        "Adamax",
        "NAdam",
        "RAdam",
        "Adadelta",
        "Lamb",
    ),
    "schedule": ("none", "step", "warmup", "cosine"),
    "clip": ("none", "global_norm", "norm", "value"),
    "accumulate": (1, 2, 4),
    "recompute": ("none", "full", "selective"),
    "zero": (0, 1, 2),
    "decay": (0.0, 0.01),
    "decay_of": ("all", "matrices"),
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
        if s.get("times", 2) < 2 or ("times" in s and s["op"] not in STACKED):
            raise Illegal(f"statement {i}: {s['op']} is not stacked")
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
    alike = other is not None and all(other.get(k) == s.get(k) for k in ("op", "at", "times")) and "of" not in other
    if not alike or [values[j] for j in s["in"]] != [values[j] for j in other["in"]]:
        raise Illegal(f"statement {i}: shares the Layer of another block")


def completed(case: Case) -> Case:
    """A case of an earlier grammar, with the simplest value for what it does not mention."""
    return {**case, "script": {**{name: choices[0] for name, choices in SCRIPT.items()}, **case["script"]}}


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
    if case["script"]["zero"] and dp == 1:
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
