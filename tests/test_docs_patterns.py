"""The code of the guide on patterns runs from top to bottom."""

from __future__ import annotations

import re
import types
from pathlib import Path

GUIDE = Path(__file__).parents[1] / "docs" / "patterns.md"


def test_the_code_of_the_guide_runs(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 7
    source = tmp_path / "guide_on_patterns.py"
    source.write_text("\n".join(blocks))  # a file, for a Layer is traced from its source
    module = types.ModuleType(source.stem)
    module.__file__ = str(source)
    monkeypatch.setitem(__import__("sys").modules, source.stem, module)
    exec(compile(source.read_text(), str(source), "exec"), module.__dict__)
    assert "matmul" in capsys.readouterr().out


def test_the_guide_names_the_whole_builder():
    from paddle_rbt_plugin.pattern import Builder

    text = GUIDE.read_text()
    methods = [name for name in vars(Builder) if not name.startswith("_")]
    assert [name for name in methods if f"g.{name}(" not in text] == []
