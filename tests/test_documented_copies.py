"""The scripts of the documentation, run by two processes without a seed, leave equal copies on both."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documented import Block, blocks
from launching import launch_all

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs" / "tutorial.md", *sorted((ROOT / "docs" / "howto").glob("*.md"))]
_START = "import paddle\npaddle.set_device('cpu')\npaddle.distributed.init_parallel_env()\n"
_SEED = re.compile(r"^paddle\.seed\(.*\n", re.MULTILINE)


def training_scripts() -> Iterator[tuple[str, Path, str]]:
    """The name, the page and the text of every script that trains with several processes: one that the page launches, or a
    block that fits an engine, with what the page sets up for it."""
    for page in PAGES:
        on_page = list(blocks(page))
        launched = [word for b in on_page if "distributed.launch" in b.code for word in b.code.split() if word.endswith(".py")]
        for block in on_page:
            if block.title in launched:
                yield f"{page.stem}-{block.title}", page, block.code
            elif block.marker == "setup" and ".fit(" in block.code:
                yield f"{page.stem}-{block.line}", page, f"{_START}{block.detail}\n{block.code}"


SCRIPTS = list(training_scripts())


def write_files(page: Path, folder: Path) -> None:
    titled: list[Block] = [block for block in blocks(page) if block.title]
    for block in titled:
        (folder / str(block.title)).write_text(block.code, encoding="utf-8")


def test_the_pages_that_train_are_found() -> None:
    assert {page.stem for _, page, _ in SCRIPTS} == {
        "README",
        "tutorial",
        "engine",
        "to-static",
        "migrate",
        "random-numbers",
        "checkpoints",
    }


@pytest.mark.slow
@pytest.mark.parametrize(("page", "text"), [s[1:] for s in SCRIPTS], ids=[s[0] for s in SCRIPTS])
def test_two_processes_without_a_seed_hold_equal_copies(page: Path, text: str, tmp_path: Path) -> None:
    write_files(page, tmp_path)
    script = tmp_path / "as_printed.py"
    script.write_text(_SEED.sub("", text), encoding="utf-8")
    assert "paddle.seed" not in script.read_text(encoding="utf-8")
    for compared in launch_all("documented_copies.py", 2, tmp_path / "compared", str(script), fresh=True):
        assert compared
