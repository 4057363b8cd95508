"""The example packages are installed by pip into a directory of their own, and their own tests pass there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "examples" / "rwkv_pattern"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The environment of a user who has installed the package."""
    if not (find_spec("pip") and find_spec("setuptools")):
        pytest.skip("needs pip and setuptools")
    root = tmp_path_factory.mktemp("rwkv")
    source = shutil.copytree(PACKAGE, root / "source", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(root / "site")]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, capture_output=True)
    path = os.pathsep.join([str(root / "site"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


@pytest.mark.slow
def test_the_packages_own_tests_pass_where_it_is_installed(installed, tmp_path):
    shutil.copy(PACKAGE / "test_rbt_rwkv_pattern.py", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_rbt_rwkv_pattern.py"]
    run = subprocess.run(command, env=installed, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and "7 passed" in run.stdout, run.stdout[-3000:]


@pytest.mark.slow
def test_a_package_that_breaks_is_reported_and_left_out(installed, tmp_path):
    (tmp_path / "rbt_rwkv_pattern.py").write_text("raise RuntimeError('broken on purpose')")
    script = "from paddle_rbt_plugin.plugins import load_plugins as l; print(*(r for r in l().rows if r.state == 'broken'))"
    env = {**installed, "PYTHONPATH": os.pathsep.join([str(tmp_path), installed["PYTHONPATH"]])}
    run = subprocess.run([sys.executable, "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    for part in ("rwkv_channel_mix = rbt_rwkv_pattern", "rbt-rwkv-pattern", "RuntimeError: broken on purpose"):
        assert part in run.stdout
