"""Runs the code of a documentation page, from top to bottom, as a reader would.

    python tests/documented.py PAGE [--slow]

Blocks of Python share one namespace, blocks of bash and the commands of console blocks run in the current folder, a block with
a ``title`` is saved under that name, and YAML and JSON are parsed. A comment right before a block says otherwise:

    <!-- not run: REASON -->      it is not run here, for example since it needs a GPU
    <!-- slow -->                 it is run with --slow only: it trains with several processes, or takes many seconds
    <!-- fails: TEXT -->          the commands fail, and say TEXT
    <!-- setup: CODE -->          Python that the reader does not see, before the block
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

FENCE = re.compile(
    r"(?:^ *<!-- (?P<marker>[a-z ]+)(?::\s(?P<detail>.*?))?\s-->\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)(?: (?P<options>[^\n]*))?\n(?P<code>.*?)^(?P=indent)```",
    re.DOTALL | re.MULTILINE,
)
RUN = ("python", "bash", "console")
DATA = {"yaml": yaml.safe_load, "json": json.loads}
SHOWN = ("text", "toml", "markdown")
MARKERS = (None, "not run", "slow", "fails", "setup")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    title: str | None
    code: str
    marker: str | None
    detail: str

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self) -> str:
        """Bash as it is; of a console block what follows the prompts."""
        if self.language == "bash":
            return self.code
        return "\n".join(line.removeprefix("$ ") for line in self.code.splitlines() if line.startswith("$ "))


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page. Raises ValueError for a language or a comment that nobody knows what to do with."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("code"))
        title = re.search(r'title="([^"]+)"', found["options"] or "")
        block = Block(page, line, found["language"], title and title[1], found["code"], found["marker"], found["detail"] or "")
        if block.language not in (*RUN, *DATA, *SHOWN):
            raise ValueError(f"{block.where}: nothing says how to check {block.language!r}")
        if block.marker not in MARKERS:
            raise ValueError(f"{block.where}: nothing says what <!-- {block.marker} --> means")
        if block.marker == "not run" and not block.detail:
            raise ValueError(f"{block.where}: say why it is not run")
        yield block


def run_page(page: Path, slow: bool) -> None:
    """Runs a page in the current folder. Raises what a block raises."""
    module = types.ModuleType("page")
    sys.modules["page"] = module
    sys.path.insert(0, "")
    for block in blocks(page):
        if block.marker == "not run" or (block.marker == "slow" and not slow):
            continue
        print(f"-- {block.where}", flush=True)
        if block.title:
            Path(block.title).write_text(block.code, encoding="utf-8")
        if block.language in DATA:
            DATA[block.language](block.code)
        elif block.language == "python":
            run_python(block, module)
        elif block.language in RUN:
            run_commands(block)


def run_python(block: Block, module: types.ModuleType) -> None:
    """Runs a block in the page's namespace, from a file, since Paddle reads the source of what it traces; a block with a title
    is a file of its own, and only compiled."""
    code = compile(block.code, block.where, "exec")
    if block.title:
        return
    if block.marker == "setup":
        exec(compile(block.detail, block.where, "exec"), module.__dict__)
    source = Path(f"block_{block.line}.py")
    source.write_text(block.code, encoding="utf-8")
    code = compile(block.code, str(source.resolve()), "exec")
    exec(code, module.__dict__)


def run_commands(block: Block) -> None:
    """Runs a block in bash, which ends at the first command that fails."""
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", block.commands], capture_output=True, text=True)
    print(done.stdout + done.stderr, flush=True)
    if block.marker == "fails":
        assert done.returncode and block.detail in done.stderr, f"{block.where}: it should fail and say {block.detail!r}"
    else:
        assert not done.returncode, f"{block.where}: exit code {done.returncode}"


if __name__ == "__main__":
    run_page(Path(sys.argv[1]), "--slow" in sys.argv[2:])
