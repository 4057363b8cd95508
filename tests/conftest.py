"""What several tests need: plugins that are real distributions, modules and a dist-info folder in a directory on sys.path."""

import importlib
import sys

import pytest

from paddle_rbt_plugin.plugins import BLOCK_VARIABLE


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a distribution: ``install("acme", {"entry": "module"}, module="source")``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(BLOCK_VARIABLE, raising=False)
    before = set(sys.modules)

    def install(distribution, points, version="1.2", **modules):
        for module, source in modules.items():
            (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[paddle_rbt]", *lines, ""]))
        importlib.invalidate_caches()

    yield install
    for module in set(sys.modules) - before:
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[module]
