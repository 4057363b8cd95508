"""The rules of the house: who may import what, and what the package never does."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import paddle_rbt_plugin

ROOT = Path(paddle_rbt_plugin.__file__).parent
MODULES = sorted(p for p in ROOT.rglob("*.py"))
ORDER = ("graph", "cluster", "layers", "pattern", "completion", "cost", "plugins", "search", "plan", "handover")
"""Bottom to top. A package imports from those before it only; ``cli`` stands above all and ``models`` beside them."""
INTERNALS = re.compile(r"paddle\.(base|_C_ops|_legacy_C_ops|framework|distributed\.(auto_parallel|passes|fleet\.meta))")


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else ""


def code_of(path: Path) -> str:
    """The module without its docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))] or [ast.Pass()]
    return ast.unparse(tree)


def imports(path: Path) -> list[str]:
    """Modules imported at the top level; what a function imports when it is called does not order the house."""
    tree = ast.parse(path.read_text())
    found = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append(node.module)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(("paddle_rbt_plugin", *path.relative_to(ROOT).parts[: -node.level]))
            found.append(f"{package}.{node.module}" if node.module else package)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


@pytest.mark.parametrize("path", [p for p in MODULES if package_of(p) in ORDER], ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_downwards(path: Path) -> None:
    allowed = set(ORDER[: ORDER.index(package_of(path)) + 1]) | {"errors", "config", "file_schema", "spelling", "validation"}
    if package_of(path) == "handover":
        allowed |= {"tuner", "models"}
    own = [m.split(".")[1] for m in imports(path) if m.startswith("paddle_rbt_plugin.")]
    assert set(own) <= allowed, f"{path} imports from {sorted(set(own) - allowed)}"


def test_only_plugins_imports_pluggy() -> None:
    assert {package_of(p) for p in MODULES if "pluggy" in imports(p)} == {"plugins"}


def test_only_readers_completion_and_handover_touch_the_internals_of_paddle() -> None:
    touching = {package_of(p) for p in MODULES if INTERNALS.search(code_of(p))}
    assert touching <= {"graph", "completion", "handover", "cost"}


def test_nothing_a_user_supplies_is_executed() -> None:
    forbidden = re.compile(r"(?<!\.)\b(import pickle|pickle\.|eval\(|exec\(|yaml\.unsafe_load|yaml\.full_load|__import__\()")
    assert not [str(p) for p in MODULES if forbidden.search(code_of(p))]


def test_only_the_command_line_ends_the_interpreter() -> None:
    leaving = re.compile(r"\b(sys\.exit|os\._exit)\(")
    assert {package_of(p) for p in MODULES if leaving.search(code_of(p))} <= {"cli", ""}
    assert not [p for p in MODULES if package_of(p) == "" and p.name != "__main__.py" and leaving.search(code_of(p))]


def test_every_public_name_of_the_package_is_documented() -> None:
    undocumented = [n for n in paddle_rbt_plugin.__all__ if not (getattr(paddle_rbt_plugin, n).__doc__ or n.startswith("hook"))]
    assert not undocumented
