"""Tests of the legacy IR run in a process of their own: FLAGS_enable_pir_api=0 pytest tests/legacy

On Paddle 2.6 the flag changes nothing, for there is no other IR. A process that runs PIR leaves them out, and skips those
that it is asked for by name; ``tests/test_legacy.py`` starts the other process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import paddle
import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
FLAG = "FLAGS_enable_pir_api"
IS_LEGACY = not paddle.get_flags(FLAG)[FLAG]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = any("legacy" in argument for argument in config.invocation_params.args)
    return True if not IS_LEGACY and not asked and collection_path.name.startswith("test_") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not IS_LEGACY:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="this process runs PIR; set FLAGS_enable_pir_api=0"))


@pytest.fixture(autouse=True)
def static_mode():
    """Legacy programs are built in static mode; a test that needs dygraph leaves it itself."""
    if not IS_LEGACY:
        yield
        return
    from paddle.distributed.auto_parallel.static import dist_context, process_group

    paddle.enable_static()
    dist_context.set_default_distributed_context(dist_context.DistributedContext())
    process_group._g_process_group_map.clear()
    process_group._g_process_group_map[0] = process_group.ProcessGroup(0, [])
    yield
    paddle.disable_static()
