"""Every command and every block of code in the README and the documentation runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from documented import RUN, blocks

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
WITH_CODE = [page for page in PAGES if any(b.language in RUN and b.marker != "not run" for b in blocks(page))]


def run(page: Path, folder: Path, *options: str) -> None:
    """Runs a page in a folder of its own, with the commands of this environment first on the path."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "documented.py"), str(page), *options]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "80"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{page.relative_to(ROOT)}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def has_slow(page: Path) -> bool:
    return any(block.marker == "slow" for block in blocks(page))


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, request):
    slow = test_also_what_starts_several_processes.__name__
    others = [item for item in request.session.items if getattr(item, "originalname", "") == slow]
    if any(item.callspec.params["page"] == page for item in others):
        pytest.skip("its slow run, which is selected too, runs these blocks as well")
    run(page, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in WITH_CODE if has_slow(p)], ids=lambda page: str(page.relative_to(ROOT)))
def test_also_what_starts_several_processes(page, tmp_path):
    run(page, tmp_path, "--slow")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_closed(page):
    assert page.read_text(encoding="utf-8").count("```") % 2 == 0
