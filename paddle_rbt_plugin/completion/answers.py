"""What Paddle answered to the oracle's questions in earlier runs.

An answer depends only on the question, on the shape of the mesh, and on the build of Paddle and the modules here that ask
it. So each shape of a mesh has a file (``cache``), in which each line is ``["digest of a question", answer]``. It is read when
a mesh is first asked about, and an answer is decoded when it is needed. What other processes have written meanwhile is merged;
if two write at the same moment, some answers are asked for again.

Ops that the installed Paddle does not declare itself (custom ops) are not cached, since their rules are another library's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.built import Built, Product, Source, Use
from paddle_rbt_plugin.completion.cache import build_of_paddle, file_of, mark_used, prune, read_lines, write_lines
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.question import Question
from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.graph.cpp_signatures import signature

MOST_BYTES_OF_A_FILE = 32 * 2**20
"""What is written of one mesh; the answers that were used least recently go first."""
_ASKING = (
    *("question.py", "scratch.py", "distributed_ops.py", "built.py", "oracle.py", "operands.py", "placement.py", "answers.py"),
    *("sample_wise.py", "synchronised.py"),
    *("../graph/pir.py", "../graph/cpp_signatures.py", "../graph/random_ops.py"),
)
"""The modules here on which answers depend."""
_PASSING = (MemoryError, RecursionError, OSError, ImportError)
"""Errors that say nothing about the question."""


class Answers:
    """The answers of the installed Paddle in ``folder``, by mesh; remembers nothing where that is None."""

    def __init__(self, folder: Path | None):
        self._folder = folder
        self._of: dict[str, MeshAnswers] = {}

    def of(self, mesh: ProcessMesh) -> MeshAnswers | None:
        """Those for meshes of one shape."""
        if self._folder is None:
            return None
        name = "-".join(f"{axis}{degree}" for axis, degree in zip(mesh.axes, mesh.shape, strict=True)) or "single"
        if name not in self._of:
            identity = json.dumps([*build_of_paddle(), _asking()])
            self._of[name] = MeshAnswers(file_of(self._folder, identity, name), identity)
        return self._of[name]

    def save(self) -> None:
        """Writes what is new, once at the end of a plan."""
        written = [answers.save() for answers in self._of.values()]
        if self._folder is not None and any(written):
            prune(self._folder)


class MeshAnswers:
    """The answers for meshes of one shape, of which a file keeps those of other runs."""

    def __init__(self, path: Path, identity: str):
        self._path = path
        self._identity = identity
        self._lines: dict[str, bytes] | None = None
        self._used: dict[str, bytes] = {}
        self._new: dict[str, bytes] = {}

    def find(self, question: Question) -> tuple[Built, ...] | None:
        """What Paddle answered; None where it is not known. Raises UnsupportedProgram where that was the answer."""
        if self._lines is None:
            self._lines = _read(self._path, self._identity)
            if self._lines:
                mark_used(self._path)
        if not self._lines:
            return None
        key = _key(question)
        line = self._lines.get(key)
        if line is None:
            return None
        try:
            answer = json.loads(line)[1]
            decoded = answer if isinstance(answer, str) else tuple(map(_built, answer))
        except (ValueError, TypeError, LookupError, AttributeError):
            return None
        self._used[key] = line
        if isinstance(decoded, str):
            raise UnsupportedProgram(decoded)
        return decoded

    def keep(self, question: Question, answer: Sequence[Built] | UnsupportedProgram) -> None:
        """Remembers an answer if it depends on nothing but the question."""
        if not _is_of_paddle(question.op) or (
            isinstance(answer, UnsupportedProgram) and isinstance(answer.__cause__, _PASSING)
        ):
            return
        plain = str(answer) if isinstance(answer, UnsupportedProgram) else list(map(_plain, answer))
        with suppress(TypeError, ValueError):  # attributes that are not plain data
            key = _key(question)
            self._new[key] = json.dumps([key, plain], separators=(",", ":")).encode()

    def save(self) -> bool:
        """Writes the file if anything is new; whether it did."""
        if not self._new:
            return False
        recent = {**self._used, **self._new}
        others = {k: v for k, v in _read(self._path, self._identity).items() if k not in recent}
        lines = _newest((*others.values(), *recent.values()), MOST_BYTES_OF_A_FILE)
        try:
            write_lines(self._path, self._identity, lines)
        except OSError:
            return False
        self._new.clear()
        return True


def _key(question: Question) -> str:
    return blake2b(repr(question).encode(), digest_size=16).hexdigest()


_KEY = slice(2, 34)
"""Where the key is in a line."""


def _read(path: Path, identity: str) -> dict[str, bytes]:
    """The lines of a file by key."""
    return {line[_KEY].decode(errors="replace"): line for line in read_lines(path, identity)}


def _newest(lines: Sequence[bytes], most: int) -> list[bytes]:
    """The last of the lines that fit into so many bytes."""
    kept: list[bytes] = []
    for line in reversed(lines):
        most -= len(line) + 1
        if most < 0:
            break
        kept.append(line)
    return kept[::-1]


@cache
def _is_of_paddle(op: str) -> bool:
    return any(signature(spelling) is not None for spelling in (op, f"{op}_"))


@cache
def _asking() -> str:
    """A digest of the modules that ask, or of the version where they are not plain files."""
    digest = blake2b(version("paddle-rbt-plugin").encode(), digest_size=16)
    with suppress(OSError):
        for name in _ASKING:
            digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()


def _plain(built: Built) -> list[Any]:
    uses = [[u.source.kind, u.source.index, *u[1:]] for u in built.uses]
    return [built.type, uses, built.products, dict(built.attrs)]


def _built(plain: Sequence[Any]) -> Built:
    type_, uses, products, attrs = plain
    return Built(type_, tuple(map(_use, uses)), tuple(map(_product, products)), {k: _tuples(v) for k, v in attrs.items()})


def _use(plain: Sequence[Any]) -> Use:
    kind, index, shape, dtype, have, need, reads = plain
    return Use(Source(kind, index), tuple(shape), dtype, _placement(have), _placement(need), reads)


def _product(plain: Sequence[Any]) -> Product:
    shape, dtype, made, kept, gradient_of = plain
    return Product(tuple(shape), dtype, _placement(made), _placement(kept), gradient_of)


def _placement(plain: Sequence[Any]) -> Placement:
    dims_mapping, partial = plain
    return Placement(tuple(dims_mapping), tuple((axis, kind) for axis, kind in partial))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
