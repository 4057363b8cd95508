"""Wheel and sdist: what is in them, and that they work where nothing else is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "from setuptools.build_meta import build_sdist, build_wheel; build_wheel('dist'); build_sdist('dist')"
LEFT_OUT = shutil.ignore_patterns(
    ".git", "__pycache__", "*.egg-info", "build", "dist", "site", "log", ".*_cache", ".nox", ".venv*"
)
PACKAGES = ("paddle_rbt_plugin", "paddle_rbt_cli", "patterns")

pytestmark = pytest.mark.slow


def build(source: Path) -> Path:
    """The folder with the wheel and the sdist of a source tree."""
    if not find_spec("setuptools"):
        pytest.skip("needs setuptools")
    subprocess.run([sys.executable, "-W", "ignore", "-c", BUILD], cwd=source, check=True, capture_output=True)
    return source / "dist"


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def contents(wheel: Path) -> set[str]:
    """The files of a wheel, without those that describe it."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    return build(shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "source", ignore=LEFT_OUT))


def test_the_wheel_holds_every_module_and_every_data_file(dist):
    held = contents(only(dist, "*.whl"))
    tree = [p for package in PACKAGES for p in (ROOT / package).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    names = {str(p.relative_to(ROOT)).replace("patterns/", "paddle_rbt_patterns/", 1) for p in tree}
    expected = {n for n in names if n.startswith(("paddle_rbt_plugin/", "paddle_rbt_cli/", "paddle_rbt_patterns/"))}
    assert held == expected


def test_the_sdist_builds_the_same_wheel(dist, tmp_path):
    with tarfile.open(only(dist, "*.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    source = only(tmp_path, "*")
    assert {"CHANGELOG.md", "LICENSE", "tests", "docs", "examples"} <= {p.name for p in source.iterdir()}
    again = build(source)
    assert contents(only(again, "*.whl")) == contents(only(dist, "*.whl"))


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory):
    """A fresh virtual environment with nothing but the wheel, Paddle, and what they need."""
    environment = tmp_path_factory.mktemp("clean") / "env"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, f"{only(dist, '*.whl')}[cpu]"], check=True)
    return environment / "bin" / "paddle-rbt"


def command(program: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *arguments], cwd=folder, capture_output=True, text=True, check=True)


def test_the_wheel_works_in_a_clean_environment(installed, tmp_path):
    listed = json.loads(command(installed, tmp_path, "patterns", "--json").stdout)["patterns"]
    assert {row["state"] for row in listed} == {"active"}
    arguments = ("plan", "gpt3-125m", "--cluster", "1x2:A100-80G", "--global-batch", "8", "--save", "plan.json", "--json")
    plan = json.loads(command(installed, tmp_path, *arguments).stdout)
    assert plan["degrees"]["pp"] * plan["degrees"]["dp"] * plan["degrees"]["mp"] == 2
    assert "A step takes" in command(installed, tmp_path, "explain", "plan.json").stdout
    assert "gpt-39b" in command(installed, tmp_path, "bench", "--list").stdout


def test_without_paddle_the_command_says_what_to_install(installed, tmp_path):
    (tmp_path / "paddle.py").write_text("raise ModuleNotFoundError('no paddle', name='paddle')")
    python = installed.parent / "python"
    script = "import sys; sys.path.insert(0, sys.argv.pop()); from paddle_rbt_cli import main; main(['patterns'])"
    done = subprocess.run([str(python), "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "install 'paddle-rbt-plugin[cpu]' or 'paddle-rbt-plugin[gpu]'" in done.stderr
    assert "Traceback" not in done.stderr
