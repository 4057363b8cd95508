"""Notes: data with a kind and figures, and one sentence per kind."""

from __future__ import annotations

import ast
from inspect import signature
from pathlib import Path

import pytest

import paddle_rbt_plugin
from paddle_rbt_plugin import notes
from paddle_rbt_plugin.notes import distinct, note

ROOT = Path(paddle_rbt_plugin.__file__).parent


def made(name: str) -> list[tuple[str, set[str]]]:
    """Kind and figures of every call of a function or method of this name in the package whose kind is written out."""
    trees = (ast.parse(path.read_text()) for path in ROOT.rglob("*.py"))
    calls = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args)
    return [
        (call.args[0].value, {keyword.arg or "**" for keyword in call.keywords})
        for call in calls
        if name in (ast.unparse(call.func), ast.unparse(call.func).rpartition("deadline.")[2])
        and isinstance(call.args[0], ast.Constant)
    ]


@pytest.mark.parametrize(("name", "words"), [("note", notes._WORDS), ("passed", notes._UNDONE)])
def test_a_kind_has_words_if_and_only_if_it_is_made_and_they_need_the_figures_it_is_made_with(name, words) -> None:
    assert {kind for kind, _ in made(name)} == set(words)
    for kind, figures in made(name):
        if "**" not in figures:
            signature(words[kind]).bind(**dict.fromkeys(figures))


def test_a_note_reads_as_its_kind_and_figures_say() -> None:
    late = note("stopped", limit_s=2.5, undone="ways", left=1, total=3)
    assert str(late) == "stopped by the time limit of 2.5 s: not tried: 1 of 3 ways to use the devices; this is the best so far"
    degrees = {"pp": 1, "dp": 4, "mp": 2}
    both = note("paddle_estimate", degrees=degrees, theirs=(0.5, 2**30), ours=(0.25, 2**31))
    assert str(both) == ("pp 1 x dp 4 x mp 2: Paddle's CostEstimator 500.000 ms, 1.00 GiB; analytic 250.000 ms, 2.00 GiB")


def test_equal_notes_are_told_once_in_order() -> None:
    first, second = note("ignored", asked=["recompute full"]), note("group_order")
    assert distinct(first, None, second, note("ignored", asked=["recompute full"])) == (first, second)
