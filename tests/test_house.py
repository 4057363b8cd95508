"""The rules of the house: who may import what, and what the package never does."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import paddle_rbt_plugin

ROOT = Path(paddle_rbt_plugin.__file__).parent
MODULES = sorted(p for p in ROOT.rglob("*.py"))
ORDER = (
    ("errors", "file_schema", "notes", "patching", "spelling"),
    ("validation",),
    ("config", "processes"),
    ("graph", "cluster"),
    ("layers", "pattern", "completion", "models"),
    ("cost",),
    ("plugins", "calibrate"),
    ("search",),
    ("request", "plan"),
    ("tuner",),
    ("handover",),
    ("api", "paddle_changes", "runs", "model_reference"),
    ("bench", "testing"),
    ("cli",),
    ("__main__",),
)
"""Bottom to top: packages and modules. What is in one row imports from the rows before it, and from its own row without going
round in a circle."""
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


def name_of(path: Path) -> str:
    parts = [ROOT.name, *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path): path for path in MODULES}


def imports(tree: ast.AST, path: Path) -> set[str]:
    """Every module that is imported, wherever the import stands: in functions and under ``TYPE_CHECKING``, too."""
    package = (ROOT.name, *path.relative_to(ROOT).parts[:-1])
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            submodules = {f"{module}.{alias.name}" for alias in node.names} & NAMES.keys()
            found |= submodules
            if len(submodules) < len(node.names):
                found.add(module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


IMPORTS = {name: imports(ast.parse(path.read_text()), path) for name, path in NAMES.items()}
OWN = {name: found & NAMES.keys() for name, found in IMPORTS.items()}
"""The imports between modules of the package."""


def row_of(module: str) -> int:
    package = module.split(".")[1]
    return next(i for i, row in enumerate(ORDER) if package in row)


def test_modules_import_each_other_in_no_circle() -> None:
    try:
        TopologicalSorter(OWN).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_packages_import_each_other_in_no_circle() -> None:
    packages: dict[str, set[str]] = {}
    for module, found in OWN.items():
        package = module.split(".")[1] if module != ROOT.name else ROOT.name
        if package != ROOT.name:
            packages.setdefault(package, set()).update({m.split(".")[1] for m in found if m != ROOT.name} - {package})
    try:
        TopologicalSorter(packages).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("module", sorted(OWN.keys() - {ROOT.name}))
def test_imports_run_downwards(module: str) -> None:
    upwards = [other for other in OWN[module] if other == ROOT.name or row_of(other) > row_of(module)]
    assert not upwards, f"{module} imports {upwards}"


def test_the_planner_knows_no_hand_over() -> None:
    known, left = set(), ["paddle_rbt_plugin.tuner"]
    while left:
        module = left.pop()
        if module not in known:
            known.add(module)
            left += OWN[module]
    assert not [module for module in known if module.split(".")[1] == "handover"]


def test_imports_are_seen_wherever_they_stand() -> None:
    source = (
        "from typing import TYPE_CHECKING\nfrom . import fields\nfrom ..errors import TunerError\n"
        "if TYPE_CHECKING:\n    import pluggy\n\ndef f():\n    from paddle_rbt_plugin.plan import plan\n"
    )
    assert imports(ast.parse(source), ROOT / "cluster" / "parse.py") == {
        "typing",
        "paddle_rbt_plugin.cluster.fields",
        "paddle_rbt_plugin.errors",
        "pluggy",
        "paddle_rbt_plugin.plan.plan",
    }


def test_only_plugins_imports_pluggy() -> None:
    assert {package_of(p) for name, p in NAMES.items() if "pluggy" in IMPORTS[name]} == {"plugins"}


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


HANDOVER = ("shared", "pir", "legacy", "dygraph", "checkpoint", "passes", "engine")
"""Bottom to top: what is in ``handover`` imports from itself, what stands before it, and not from what stands behind it."""
BESIDE = {"pir", "legacy", "dygraph"}
"""What executes a plan; none of these imports another."""


def handover_imports(path: Path) -> set[str]:
    """The folders of ``handover`` that a module imports from, in functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    start = "paddle_rbt_plugin.handover."
    return {name.removeprefix(start).split(".")[0] for name in names if name.startswith(start)}


@pytest.mark.parametrize(
    "path", [p for p in MODULES if package_of(p) == "handover"], ids=lambda p: str(p.relative_to(ROOT / "handover"))
)
def test_handover_imports_run_downwards_in_functions_too(path: Path) -> None:
    folder = path.relative_to(ROOT / "handover").parts[0].removesuffix(".py")
    above = () if folder == "__init__" else HANDOVER[: HANDOVER.index(folder)]
    allowed = {folder, *above} - (BESIDE - {folder} if folder in BESIDE else set())
    assert handover_imports(path) <= allowed, f"{path} imports from {sorted(handover_imports(path) - allowed)}"


def changes_of_paddle(path: Path) -> list[str]:
    """Where a module sets attributes of what it imports from Paddle, or flags of Paddle, without ``patching``."""
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "paddle":
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {(a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] == "paddle"}

    def is_of_paddle(node: ast.AST) -> bool:
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        return isinstance(node, ast.Name) and node.id in names

    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)):
            targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [node.target]
            targets = [t for of in targets for t in (of.elts if isinstance(of, (ast.Tuple, ast.List)) else [of])]
            if any(isinstance(t, (ast.Attribute, ast.Subscript)) and is_of_paddle(t) for t in targets):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            sets = called in ("setattr", "delattr") or called.endswith(("patch.object", "monkeypatch.setattr"))
            if (
                (sets and node.args and is_of_paddle(node.args[0]))
                or called in ("paddle.set_flags", "set_flags")
                or called.endswith(("set_field_default_config", "register_reshard_func"))
            ):
                found.append(ast.unparse(node))
    return found


def test_paddle_is_changed_through_patching_only() -> None:
    found = {str(p.relative_to(ROOT)): changes_of_paddle(p) for p in MODULES if p.name != "patching.py"}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_changes_of_paddle_are_seen_whatever_their_spelling(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "import paddle\nfrom paddle.nn import Layer as L\n\ndef f():\n    import paddle.jit as jit\n    jit.a = 1\n"
        "L.b, x = 1, 2\nsetattr(paddle.nn, 'c', 3)\npaddle.set_flags({})\npaddle.table['d'] = 4\nx.e = 5\ndel L.f\n"
    )
    assert len(changes_of_paddle(module)) == 6
