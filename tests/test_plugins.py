"""Plugins are real distributions here, see the fixture ``install``."""

import json
import os
import random
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from pattern_graphs import GraphWriter

from paddle_rbt_plugin.errors import PatternError
from paddle_rbt_plugin.pattern import match_all
from paddle_rbt_plugin.plugins import BLOCK_VARIABLE, PluginWarning, load_plugins, manager

EXAMPLE = Path(__file__).parents[1] / "examples" / "swiglu_pattern"
REFERENCE = {"qkv", "row_matmul", "ffn", "shared_word_embedding", "position_embedding", "unsqueeze_data", "reshape_data"}

HEADER = """
from paddle_rbt_plugin.pattern import Pattern
from paddle_rbt_plugin.plugins import hookimpl

class Relu(Pattern):
    name = "acme_relu"
    def build(self, g):
        g.op("relu", g.tensor("x"))
    shard = {"x": ("dp", ...)}

class Other(Relu):
    name = "acme_other"
"""
GOOD = HEADER + "\n@hookimpl\ndef register_patterns(register):\n    register(Relu)\n"


def load(*blocked):
    """Loaded plugins, and their rows without the built-in ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        plugins = load_plugins(blocked)
    return plugins, [row for row in plugins.rows if row.distribution != "paddle-rbt-plugin"]


def names(plugins):
    return {p.name for p in plugins.patterns}


def test_the_reference_patterns_are_plugins_like_any_other():
    plugins, _ = load()
    rows = [row for row in plugins.rows if row.distribution == "paddle-rbt-plugin"]
    assert {row.name for row in rows} >= REFERENCE
    assert {row.state for row in rows} == {"active"}
    assert {row.entry_point for row in rows} >= {f"{name} = paddle_rbt_patterns.{name}" for name in REFERENCE}


def test_an_installed_plugin_is_found_with_its_distribution_and_version(install):
    install("acme-patterns", {"acme": "acme_mod"}, acme_mod=GOOD)
    plugins, rows = load()
    assert [(r.name, r.distribution, r.version, r.entry_point, r.state, r.reason) for r in rows] == [
        ("acme_relu", "acme-patterns", "1.2", "acme = acme_mod", "active", "")
    ]
    pattern = plugins.pattern("acme_relu")
    assert (pattern.distribution, pattern.version) == ("acme-patterns", "1.2")


@pytest.mark.parametrize(
    ("source", "name", "reason"),
    [
        ("raise RuntimeError('boom at import')", "acme", "RuntimeError: boom at import"),
        ("import no_such_module_at_all", "acme", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("def f(:", "acme", "SyntaxError: "),
        ("import sys; sys.exit(3)", "acme", "SystemExit: 3"),
        ("class Odd(BaseException): pass\nraise Odd('x')", "acme", "Odd: x"),
        ("x = 1", "acme", "PatternError: acme_mod implements no hook"),
        (HEADER + "@hookimpl\ndef register_pattern(register): pass", "acme", "PluginValidationError: unknown hook"),
        (HEADER + "@hookimpl\ndef register_patterns(registry): pass", "acme", "PluginValidationError: "),
        (HEADER + "@hookimpl\ndef register_patterns(register): register(Relu); 1 / 0", "acme", "ZeroDivisionError"),
        (GOOD.replace('{"x": ("dp", ...)}', "None"), "acme_relu", "PatternError: pattern 'acme_relu' has no shard spec"),
        (GOOD.replace('{"x":', '{"y":'), "acme_relu", "PatternError: pattern 'acme_relu': shard names 'y', which"),
        (
            GOOD.replace('tensor("x")', 'tensor("x", ndim=1)').replace("...", "None"),
            "acme_relu",
            "has entries for 2 dimensions",
        ),
        (
            GOOD.replace("acme_relu", "qkv"),
            "qkv",
            "PatternError: the name 'qkv' is already taken by a pattern of paddle-rbt-plugin",
        ),
        (GOOD.replace("register(Relu)", "register(int)"), "acme", "PatternError: register() takes a subclass of Pattern"),
        (
            GOOD.replace("register(Relu)", "register(Relu())"),
            "acme_relu",
            "PatternError: register() takes a subclass of Pattern",
        ),
        (GOOD.replace('g.op("relu", g.tensor("x"))', "raise SystemExit"), "acme_relu", "SystemExit"),
        (GOOD.replace('g.op("relu"', 'g.pop("relu"'), "acme_relu", "build() raised AttributeError"),
        (
            HEADER
            + "class Meta(type):\n    name = property(lambda cls: 1 / 0)\nclass Odd(metaclass=Meta): pass\n"
            + "@hookimpl\ndef register_patterns(register): register(Odd)",
            "acme",
            "PatternError: register() takes a subclass of Pattern",
        ),
        (
            HEADER
            + "class Meta(type):\n    name = property(lambda cls: exit())\nclass Odd(metaclass=Meta): pass\n"
            + "@hookimpl\ndef register_patterns(register): register(Odd)",
            "acme",
            "PatternError: register() takes a subclass of Pattern",
        ),
        (
            "class Odd(Exception):\n    def __str__(self): raise SystemExit\nraise Odd",
            "acme",
            "Odd: its message cannot be read",
        ),
    ],
)
def test_a_broken_plugin_is_left_out_and_listed_with_the_cause(install, source, name, reason):
    install("acme-patterns", {"acme": "acme_mod"}, acme_mod=source)
    with pytest.warns(PluginWarning, match=f"'{name}' of acme-patterns 1.2 is left out"):
        plugins = load_plugins()
    (row,) = [r for r in plugins.rows if r.distribution == "acme-patterns"]
    assert (row.name, row.version, row.entry_point, row.state) == (name, "1.2", "acme = acme_mod", "broken")
    assert reason in row.reason
    assert names(plugins) >= REFERENCE
    if name != "qkv":
        with pytest.raises(PatternError, match=f"'{name}' .acme-patterns 1.2, .* is broken: "):
            plugins.pattern(name)


def test_one_malformed_pattern_leaves_its_plugins_others_in_use(install):
    source = GOOD.replace("    register(Relu)", "    Other.shard = None\n    register(Other)\n    register(Relu)")
    install("acme", {"acme": "acme_mod"}, acme_mod=source)
    _, rows = load()
    assert [(r.name, r.state) for r in rows] == [("acme_other", "broken"), ("acme_relu", "active")]


def test_a_pattern_that_raises_while_matching_is_reported_with_its_package_and_the_others_go_on(install):
    source = GOOD.replace('g.tensor("x")', 'g.tensor("x", where=lambda t: 1 / 0)')
    install("acme-patterns", {"acme": "acme_mod"}, acme_mod=source)
    w = GraphWriter()
    w.linear(w.op("relu", w.linear(w.data(8, 16, 64), 64, 256)), 256, 64)
    plugins, _ = load()
    cause = "ZeroDivisionError: division by zero (acme-patterns 1.2, entry point 'acme = acme_mod')"
    with pytest.warns(UserWarning, match=f"'acme_relu' is left out, its own code raised {re.escape(cause)}"):
        result = match_all(w.graph(), plugins.patterns)
    assert result.failed == {"acme_relu": cause}
    assert "ffn" in {m.pattern for m in result.matches}


def test_an_interrupt_from_the_keyboard_passes_through(install):
    install("acme", {"acme": "acme_mod"}, acme_mod="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_plugins()


@pytest.mark.parametrize("name", ["acme", "acme_relu", "Acme.Patterns"])
def test_a_plugin_is_blocked_by_entry_point_pattern_or_distribution(install, name):
    install("acme-patterns", {"acme": "acme_mod"}, acme_mod=GOOD)
    plugins, (row,) = load(name)
    assert (row.state, row.reason) == ("blocked", "blocked by name")
    assert names(plugins) >= REFERENCE and "acme_relu" not in names(plugins)
    with pytest.raises(PatternError, match="is blocked"):
        plugins.pattern(row.name)


def test_the_environment_variable_blocks_too(install, monkeypatch):
    install("acme", {"acme": "acme_mod"}, acme_mod=GOOD)
    monkeypatch.setenv(BLOCK_VARIABLE, "acme_relu, qkv")
    plugins, (row,) = load()
    assert row.reason == f"blocked by {BLOCK_VARIABLE}"
    assert REFERENCE - names(plugins) == {"qkv"}


def test_a_blocked_plugin_is_not_imported(install):
    install("acme", {"acme": "acme_mod"}, acme_mod="raise RuntimeError")
    _, (row,) = load("acme")
    assert row.state == "blocked" and "acme_mod" not in sys.modules


def test_a_blocked_name_that_nothing_has_is_an_error_with_a_suggestion(install):
    with pytest.raises(PatternError, match=r"cannot block 'row_matmull'.*did you mean 'row_matmul'"):
        load_plugins(["row_matmull"])


def test_in_the_environment_variable_such_a_name_is_a_warning(install, monkeypatch):
    monkeypatch.setenv(BLOCK_VARIABLE, "row_matmull")
    with pytest.warns(PluginWarning, match="did you mean 'row_matmul'"):
        assert names(load_plugins()) >= REFERENCE


def test_a_pattern_of_a_blocked_distribution_may_be_blocked_as_well(install):
    install("acme-patterns", {"acme": "acme_mod"}, acme_mod=GOOD)
    with pytest.warns(PluginWarning, match="cannot block 'acme_relu'"):
        load_plugins(["acme-patterns", "acme_relu"])


def test_a_pattern_that_does_not_exist_is_an_error_with_a_suggestion():
    with pytest.raises(PatternError, match="no plugin gives a pattern named 'fnn'; did you mean 'ffn'"):
        load()[0].pattern("fnn")


def test_the_order_does_not_depend_on_the_order_in_which_packages_are_found(install, monkeypatch):
    install("zeta", {"b": "zeta_mod", "a": "zeta_two"}, zeta_mod=GOOD, zeta_two=GOOD.replace("acme_relu", "two"))
    install("alpha", {"c": "alpha_mod"}, alpha_mod=GOOD.replace("acme_relu", "three"))
    expected, rows = load()
    assert [r.name for r in rows] == ["three", "two", "acme_relu"]
    points = list(manager.entry_points(group="paddle_rbt"))
    for seed in range(5):
        random.Random(seed).shuffle(points)
        monkeypatch.setattr(manager, "entry_points", lambda group: tuple(points))
        assert load()[0].rows == expected.rows


def test_the_example_package_installs_and_matches_llama(tmp_path):
    """Installed by pip as a user would, in a process of its own."""
    for tool in ("pip", "setuptools"):
        pytest.importorskip(tool)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    copy = tmp_path / "source"
    copy.mkdir()
    for file in EXAMPLE.glob("*.py"):
        (copy / file.name).write_text(file.read_text())
    subprocess.run([*command, "--target", str(tmp_path / "site"), str(copy)], check=True, capture_output=True)
    script = """
import json
from pattern_graphs import GraphWriter
from paddle_rbt_plugin.pattern import match_all
from paddle_rbt_plugin.plugins import load_plugins
w = GraphWriter()
x = w.data(8, 16, 64)
h = w.op("multiply", w.op("silu", w.linear(x, 64, 256, bias=False)), w.linear(x, 64, 256, bias=False))
w.linear(h, 256, 64, bias=False)
pattern = load_plugins().pattern("swiglu_ffn")
(match,) = match_all(w.graph(), [pattern]).matches
print(json.dumps([match.pattern, match.distribution, match.version, len(match.specs)]))
"""
    path = os.pathsep.join([str(tmp_path / "site"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True
    )
    assert json.loads(run.stdout) == ["swiglu_ffn", "rbt-swiglu-pattern", "0.1.0", 4]
