"""Makes a failing case small: greedily, over the case's own data.

hypothesis would draw and shrink as well, but it shrinks by replaying choices through the generator: it runs a test hundreds of
times, takes another failure for the same one, and the case that it ends with depends on its version and its database. A case
here takes seconds in other processes, and the grammar says what is simpler than what. So passes over the statements, the
attributes, the script and the sizes, until nothing more can go, need some tens of runs; and a case is data that ``--case`` runs
again.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

from random_models.blocks import BLOCKS
from random_models.grammar import LOSSES, SCRIPT, Case, Illegal, check, pruned, shapes

MAX_RUNS = 80


def shrink(case: Case, fails: Callable[[Case], bool], runs: int = MAX_RUNS) -> Case:
    """The smallest case found that still ``fails``, after at most so many calls of it."""
    tried = {_key(case)}
    while True:
        for candidate in _simpler(case):
            key = _key(candidate)
            if key in tried:
                continue
            tried.add(key)
            if runs <= 0:
                return case
            runs -= 1
            if fails(candidate):
                case = candidate
                break
        else:
            return case


def _key(case: Case) -> str:
    return json.dumps(case, sort_keys=True)


def _simpler(case: Case) -> Iterator[Case]:
    """Legal cases that are simpler than this one, the boldest steps first."""
    for candidate in _changes(case):
        try:
            candidate = pruned(candidate)
            check(candidate)
        except (Illegal, IndexError, KeyError):
            continue
        yield candidate


def _changes(case: Case) -> Iterator[Case]:
    yield from _fewer_outputs(case)
    yield from _without_script(case)
    yield from _fewer_statements(case)
    yield from _simpler_rest(case)
    yield from _simpler_attributes(case)


def _fewer_outputs(case: Case) -> Iterator[Case]:
    if len(case["outputs"]) > 1:
        for i in range(len(case["outputs"])):
            yield {**case, "outputs": [o for j, o in enumerate(case["outputs"]) if j != i]}


def _without_script(case: Case) -> Iterator[Case]:
    """All of the script's features away at once, then one by one."""
    script = case["script"]
    plain = {name: choices[0] for name, choices in SCRIPT.items() if name != "steps"}
    yield {**case, "script": {**script, **plain}}
    for name, value in plain.items():
        if script[name] != value:
            yield {**case, "script": {**script, name: value}}
    if case["returned"]:
        yield {**case, "returned": False}


def _fewer_statements(case: Case) -> Iterator[Case]:
    """A statement goes where its readers can read one of its operands, or an earlier value, instead."""
    values = shapes(case)
    for i in range(len(case["model"]) - 1, -1, -1):
        s = case["model"][i]
        if "times" in s:
            yield _changed(case, i, {k: v for k, v in s.items() if k != "times"})
            yield _changed(case, i, {**s, "times": s["times"] - 1})
        if "of" in s and s["op"] != "tied_head":
            yield _changed(case, i, {k: v for k, v in s.items() if k != "of"})
        for j in dict.fromkeys((*s["in"], *range(i))):
            if values[j] == values[i] or (j in s["in"] and values[j].kind in ("seq", "vec", "img")):
                yield _redirected(case, i, j)
    for k, output in enumerate(case["outputs"]):  # the loss reads an earlier value
        for j in range(output["value"]):
            if values[j].kind in ("seq", "vec"):
                outputs = list(case["outputs"])
                outputs[k] = {**output, "value": j}
                yield {**case, "outputs": outputs}


def _redirected(case: Case, old: int, new: int) -> Case:
    model = [{**s, "in": [new if j == old else j for j in s["in"]]} for s in case["model"]]
    outputs = [{**o, "value": new if o["value"] == old else o["value"]} for o in case["outputs"]]
    return {**case, "model": model, "outputs": outputs}


def _simpler_rest(case: Case) -> Iterator[Case]:
    steps = case["script"]["steps"]
    for fewer in range(1, steps):
        yield {**case, "script": {**case["script"], "steps": fewer}}
    dp, mp = case["layout"]["dp"], case["layout"]["mp"]
    for layout in ({"dp": min(dp, 2), "mp": 1}, {"dp": 1, "mp": min(mp, 2)}):
        if layout != case["layout"] and layout["dp"] * layout["mp"] > 1:
            yield {**case, "layout": layout}
    if case["entry"] == "engine" and case["script"]["accumulate"] == 1:
        yield {**case, "entry": "to_static"}
    for k, output in enumerate(case["outputs"]):
        first = LOSSES[output["loss"]]["form"][0]
        if output["form"] != first:
            outputs = copy.deepcopy(case["outputs"])
            outputs[k]["form"] = first
            yield {**case, "outputs": outputs}
    if case["sizes"]["batch"] > 8:
        yield {**case, "sizes": {**case["sizes"], "batch": 8}}


def _simpler_attributes(case: Case) -> Iterator[Case]:
    """Every attribute to the first of its choices: all of a statement at once, then one by one; widths and vocabularies in all
    statements at once."""
    for name in ("width", "words"):
        for value in sorted({s["at"][name] for s in case["model"] if name in s["at"]})[:1]:
            yield {
                **case,
                "model": [{**s, "at": {**s["at"], **({name: value} if name in s["at"] else {})}} for s in case["model"]],
            }
    for i, s in enumerate(case["model"]):
        choices = BLOCKS[s["op"]].choices
        simple = {n: c[0] for n, c in choices.items() if n not in ("width", "words")}
        if any(s["at"][n] != v for n, v in simple.items()):
            yield _changed(case, i, {**s, "at": {**s["at"], **simple}})
        for name, values in choices.items():
            for value in values[: values.index(s["at"][name]) if s["at"][name] in values else 1]:
                yield _changed(case, i, {**s, "at": {**s["at"], name: value}})


def _changed(case: Case, i: int, statement: dict[str, Any]) -> Case:
    """With another statement; Layers that are shared with it change alike."""
    model = list(case["model"])
    model[i] = statement
    for j, s in enumerate(model):
        if s.get("of") == i and s["op"] == statement["op"]:
            model[j] = {**statement, "in": s["in"], "of": i}
    return {**case, "model": model}
