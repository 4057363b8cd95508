"""The guide on patterns is complete; tests/test_docs_code.py runs its code."""

from __future__ import annotations

from pathlib import Path

GUIDE = Path(__file__).parents[1] / "docs" / "patterns.md"


def test_the_guide_names_the_whole_builder():
    from paddle_rbt_plugin.pattern import Builder

    text = GUIDE.read_text()
    methods = [name for name in vars(Builder) if not name.startswith("_")]
    assert [name for name in methods if f"g.{name}(" not in text] == []
