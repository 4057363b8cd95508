"""Draws cases. The same seed and number give the same case on every machine: ``random.Random`` of a string, and no sets."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from random_models.blocks import BLOCKS, CRASHING, STACKED, Value
from random_models.grammar import ENTRIES, LAYOUTS, SCRIPT, Case, Illegal, Statement, check, pruned, shapes

VOCABULARIES = (32, 64, 48, 50)
"""The last is one that four ranks cannot divide."""
_VOCABULARY_WEIGHTS = (4, 4, 2, 1)
BATCHES = (8, 8, 12, 16, 32)


def draw_case(
    seed: int, number: int, layouts: Sequence[str] = tuple(LAYOUTS), entries: Sequence[str] = ENTRIES, crashing: bool = False
) -> Case:
    """The case of that number. ``crashing`` admits blocks that may end the process."""
    random = Random(f"{seed}-{number}")
    for _ in range(1000):
        case = _attempt(random, layouts, entries, crashing)
        try:
            check(case)
        except Illegal:
            continue
        return case
    raise Illegal(f"no legal case for {seed}-{number} with layouts {layouts} and entries {entries}")


def _attempt(random: Random, layouts: Sequence[str], entries: Sequence[str], crashing: bool) -> Case:
    writer = _Writer(random, crashing)
    writer.inputs()
    for _ in range(random.choices((0, 1, 2, 3, 4, 5, 6), (1, 3, 4, 4, 3, 2, 1))[0]):
        writer.block()
    outputs = writer.outputs()
    case: Case = {
        "model": writer.model,
        "outputs": outputs,
        "returned": random.random() < 0.12,
        "seed": random.randrange(10**6),
    }
    if not outputs:
        return {**case, "outputs": []}
    case = pruned(case)
    divides = any(BLOCKS[s["op"]].divides for s in case["model"])
    heads = [s["at"]["heads"] for s in case["model"] if "heads" in s["at"]]
    names = [n for n in layouts if LAYOUTS[n][1] == 1 or (divides and all(h % LAYOUTS[n][1] == 0 for h in heads))]
    if not names:
        return {**case, "outputs": []}
    layout = random.choices(names, [1 if n.endswith("4") else 2 for n in names])[0]
    dp, mp = LAYOUTS[layout]
    allowed = [e for e in entries if e == "dygraph" or 1 in (dp, mp)]
    if not allowed:
        return {**case, "outputs": []}
    entry = random.choice(allowed)
    script = _script(random, dp, entry)
    if any(s["at"].get("norm") == "batch" for s in case["model"]):
        script["recompute"] = "none"  # its running means would be updated twice
    if entry == "dygraph" and script["recompute"] != "none":  # whole Layers of a LayerList
        script["recompute"] = "full" if any("times" in s for s in case["model"]) else "none"
    if script["optimizer"] == "RMSProp" and entry != "dygraph":  # which Paddle cannot build on distributed tensors
        script["optimizer"] = "Adagrad"
    if script["optimizer"] == "Lamb":  # whose update reads whole weights
        script["zero"] = 0
    batch = random.choice([n for n in BATCHES if n % (dp * script["accumulate"]) == 0])
    return {"sizes": {"batch": batch}, **case, "script": script, "layout": {"dp": dp, "mp": mp}, "entry": entry}


def _script(random: Random, dp: int, entry: str) -> dict[str, Any]:
    script: dict[str, Any] = {
        "optimizer": random.choice(SCRIPT["optimizer"]),
        "schedule": random.choices(SCRIPT["schedule"], (5, 1, 1, 1))[0],
        "clip": random.choices(SCRIPT["clip"], (5, 3, 1, 1))[0],
        "accumulate": random.choices((1, 2, 4), (6, 2, 1))[0] if entry != "to_static" else 1,
        "recompute": random.choices(SCRIPT["recompute"], (8, 1, 1))[0],
        "zero": random.choices((0, 1, 2), (6, 1, 1))[0] if dp > 1 else 0,
        "decay": random.choice(SCRIPT["decay"]),
        "decay_of": random.choices(SCRIPT["decay_of"], (3, 1))[0],
        "steps": random.choice((3, 4)),
    }
    return script


class _Writer:
    """Writes the statements of one model."""

    def __init__(self, random: Random, crashing: bool):
        self.random = random
        self.blocks = {n: b for n, b in BLOCKS.items() if b.weight or (crashing and n in CRASHING)}
        self.model: list[Statement] = []
        self.values: list[Value] = []
        self.words = random.choices(VOCABULARIES, _VOCABULARY_WEIGHTS)[0]
        self.width = random.choice((16, 32))
        self.length = random.choices((8, 6, 12), (3, 1, 1))[0]

    def write(self, op: str, operands: Sequence[int] = (), **at: Any) -> int | None:
        """Adds a statement, whose attributes are drawn unless given; None where it does not apply."""
        block = BLOCKS[op]
        drawn = {name: self._choose(op, name, choices) for name, choices in block.choices.items()}
        more = {key: at[key] for key in ("of", "times") if at.get(key) is not None}
        drawn.update({k: v for k, v in at.items() if k in drawn})
        statement: Statement = {"op": op, "in": list(operands), "at": drawn, **more}
        self.model.append(statement)
        try:
            self.values = shapes({"model": self.model})
        except Illegal:
            self.model.pop()
            return None
        return len(self.model) - 1

    def _choose(self, op: str, name: str, choices: Sequence[Any]) -> Any:
        if name == "width" and op != "head":
            return self.random.choices((self.width, *choices), (4, *(1 for _ in choices)))[0]
        return self.random.choice(choices)

    def inputs(self) -> None:
        kinds = self.random.choices(("tokens", "features", "table", "image"), (9, 2, 2, 2), k=1 + (self.random.random() < 0.25))
        for kind in kinds:
            i = self.write(kind, words=self.words, width=self.width, length=self.length)
            assert i is not None
            if kind == "tokens":
                self.embed(i)
            elif kind == "image" and self.random.random() < 0.4:
                self.write("patch_embedding", [i], width=self.width)

    def embed(self, ids: int) -> None:
        """One embedding of tokens, or the sum of two."""
        first = self.write("embedding", [ids], width=self.width)
        if first is not None and self.random.random() < 0.15:
            second = self.write("embedding", [ids], width=self.width)
            if second is not None:
                self.write("add", [first, second], how="add")

    def block(self) -> None:
        """One more block, mostly of the newest value."""
        for _ in range(20):
            name = self.random.choices(list(self.blocks), [b.weight or 1 for b in self.blocks.values()])[0]
            if name in ("patch_embedding", "embedding") and self.random.random() < 0.8:
                continue
            if name == "masked_attention" and not any(v.kind == "mask" for v in self.values):
                if self.values[-1].kind != "seq":
                    continue
                newest = len(self.model) - 1
                mask = self.write("attention_mask", length=self.values[newest].shape[0])
                if self.write(name, [newest, mask]) is not None:
                    return
                continue
            operands = []
            for position, kinds in enumerate(BLOCKS[name].takes):
                fitting = [i for i, v in enumerate(self.values) if v.kind in kinds.split("|")]
                if not fitting:
                    break
                newest = fitting[-1]
                operands.append(newest if position == 0 and self.random.random() < 0.85 else self.random.choice(fitting))
            else:
                times = self.random.choice((2, 3)) if name in STACKED and self.random.random() < 0.25 else None
                if self.write(name, operands, times=times) is not None:
                    if self.random.random() < 0.12:
                        self._again()
                    return

    def _again(self) -> None:
        """The newest Layer once more, on what it made."""
        newest = self.model[-1]
        if newest["in"] and newest["op"] not in ("add", "concat", "append", "stack"):
            self.write(
                newest["op"],
                [len(self.model) - 1, *newest["in"][1:]],
                **newest["at"],
                of=len(self.model) - 1,
                times=newest.get("times"),
            )

    def outputs(self) -> list[dict[str, Any]]:
        """Heads and losses: one, sometimes two."""
        used = {j for s in self.model for j in s["in"]}
        ends = [i for i, v in enumerate(self.values) if v.kind in ("seq", "vec", "img") and i not in used]
        if not ends:
            return []
        chosen = [ends[-1]]
        if self.random.random() < 0.2:
            chosen.append(self.random.choice(ends))
        return [self._output(i) for i in chosen]

    def _output(self, i: int) -> dict[str, Any]:
        value = self.values[i]
        kind = self.random.random()
        if value.kind == "img":
            made = self.write("image_pool", [i]) if kind < 0.5 else self.write("flatten", [i])
            i = made if made is not None else i
            value = self.values[i]
        if value.kind == "img" or kind < 0.12:  # the loss reads the value itself
            return self._distance(i)
        tied = [
            j
            for j, s in enumerate(self.model)
            if s["op"] == "embedding" and s["at"]["width"] == value.shape[-1] and value.kind == "seq"
        ]
        if kind < 0.75:
            if tied and self.random.random() < 0.5:
                words = self.model[self.model[tied[0]]["in"][0]]["at"]["words"]
                head = self.write("tied_head", [i], words=words, of=tied[0])
            else:
                head = self.write("head", [i], width=self.words if value.kind == "seq" else self.random.choice((4, 32)))
            assert head is not None
            forms = (
                "plain",
                "layer",
                "none_mean",
                "half",
                "penalty",
                "mean_again",
                "masked",
                "smoothing_argument",
                "smoothing_labels",
                "soft_labels",
                "log_softmax",
                "softmax_with",
                "ignore_index",
                "masked_sum",
                "sum_over_batch",
            )
            form = self.random.choices(forms, (4, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1))[0]
            return {"value": head, "loss": "cross_entropy", "form": form}
        head = self.write("head", [i], width=4)
        assert head is not None
        return self._distance(head)

    def _distance(self, i: int) -> dict[str, Any]:
        forms = ("mse", "l1", "smooth_l1", "square_mean", "half", "none_mean", "sum_over_batch", "penalty")
        return {"value": i, "loss": "distance", "form": self.random.choice(forms)}
