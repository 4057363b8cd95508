"""Fixtures and hooks of the whole suite."""

import importlib
import os
import signal
import sys

import pytest

from paddle_rbt_plugin.completion.cache import CACHE_VARIABLE
from paddle_rbt_plugin.plugins import BLOCK_VARIABLE


def pytest_configure(config: pytest.Config) -> None:
    """Tests send SIGINT to processes that they start. A shell starts background jobs with SIGINT ignored, and child processes
    inherit that; a handler, unlike SIG_IGN, is reset to the default in a child process.

    pytest-xdist starts with the files that have the most tests, which are not the slowest: it keeps the order of collection
    instead (``pytest_collection_modifyitems``)."""
    os.environ[CACHE_VARIABLE] = "off"  # tests ask Paddle itself, and leave the developer's cache alone
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers of pytest-xdist (``--dist loadfile``) take the files that contain slow tests first, so that none of them is
    left over for the end."""
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a distribution, modules and a dist-info folder in a directory on sys.path:
    ``install("acme", {"entry": "module"}, module="source")``."""
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
