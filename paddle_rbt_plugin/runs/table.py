"""Reads a table of training runs: one run per row of a CSV file, columns in any order, others ignored, empty means default."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.validation import Kind, check, one_of

REQUIRED = ("gpu", "gpus", "layers", "hidden", "heads", "vocab", "seq", "mbs", "gbs")
"""Columns that have no default."""
CHOICES: Mapping[str, tuple[str, ...]] = {
    "arch": ("gpt", "llama"),
    "sharding": ("none", "stage1", "stage2", "stage3"),
    "precision": ("fp16", "bf16", "fp32"),
    "recompute": ("none", "selective", "full"),
    "seq_parallel": ("0", "1"),
}
"""Values of the columns that name one of a few."""
DEFAULTS = {
    "gpus_per_node": 8, "arch": "gpt", "tp": 1, "pp": 1, "cp": 1, "sharding": "none", "vpp": 1, "precision": "fp16",
    "recompute": "none", "seq_parallel": "0",
}  # fmt: skip
"""What an empty cell means. Further: id is the row's number, ffn 4 * hidden, kv_heads heads, dp what the other degrees leave of
the devices, and inter_node_GBps that of the usual machine with this device."""

_COUNT = Kind("a whole number of at least 1", Annotated[int, Field(ge=1)])
_MEASURE = Kind("a number above 0", Annotated[float, Field(gt=0, allow_inf_nan=False)])
"""Cells are text, which pydantic converts unless it is told to be strict."""


@dataclass(frozen=True)
class TrainingRun:
    """One run of a table, checked and complete."""

    id: str
    gpu: str
    gpus: int
    gpus_per_node: int
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    arch: str
    tp: int
    pp: int
    dp: int
    cp: int
    sharding: str
    vpp: int
    mbs: int
    """Samples of a micro batch per data-parallel rank."""
    gbs: int
    """Samples of a step on all devices."""
    precision: str
    recompute: str
    seq_parallel: bool
    inter_node_GBps: float | None
    """Network bandwidth of a machine in one direction, 1e9 bytes per second; None for that of the usual machine."""
    measured_step_time_s: float | None = None
    measured_peak_memory_MB: float | None = None
    """2^20 bytes."""

    @property
    def micro_batches(self) -> int:
        """Micro batches of a step per data-parallel rank."""
        return self.gbs // self.dp // self.mbs


def read_runs(path: str | Path) -> tuple[TrainingRun, ...]:
    """The runs of a CSV file, in its order.

    Raises TunerError that names the file, the row and the column, and says what would be right."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            columns = reader.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TunerError(f"the table of runs {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    missing = [c for c in REQUIRED if c not in columns]
    if missing:
        found = ", ".join(columns) or "none"
        raise TunerError(f"{path} lacks the columns {', '.join(missing)}; found: {found}")
    runs = tuple(_Row(path, number, row).run() for number, row in enumerate(rows, start=1))
    ids = [run.id for run in runs]
    if len(set(ids)) < len(ids):
        raise TunerError(f"{path}: ids must be unique, but {', '.join(sorted({i for i in ids if ids.count(i) > 1}))} are not")
    return runs


class _Row:
    """One row, read cell by cell."""

    def __init__(self, path: str | Path, number: int, cells: Mapping[str, Any]):
        self.path = path
        self.cells = cells
        self.id = str(cells.get("id") or "").strip() or str(number)

    def run(self) -> TrainingRun:
        number, gpus = self._count, self._count("gpus")
        hidden, heads = number("hidden"), number("heads")
        tp, pp, cp = number("tp"), number("pp"), number("cp")
        given: dict[str, Any] = {
            "id": self.id,
            "gpu": self._text("gpu"),
            "ffn": number("ffn", 4 * hidden),
            "kv_heads": number("kv_heads", heads),
            "dp": number("dp", max(1, gpus // (tp * pp * cp))),
            "seq_parallel": self._choice("seq_parallel") == "1",
            "inter_node_GBps": self._measure("inter_node_GBps"),
            "measured_step_time_s": self._measure("measured_step_time_s"),
            "measured_peak_memory_MB": self._measure("measured_peak_memory_MB"),
        }
        reader: Callable[[str], Any]
        for field in fields(TrainingRun):
            if field.name not in given:
                reader = self._choice if field.name in CHOICES else self._count
                given[field.name] = reader(field.name)
        run = TrainingRun(**given)
        self._check(run)
        return run

    def _check(self, run: TrainingRun) -> None:
        if run.tp * run.pp * run.dp * run.cp != run.gpus:
            product = f"{run.tp} x {run.pp} x {run.dp} x {run.cp} = {run.tp * run.pp * run.dp * run.cp}"
            raise self._error("gpus", f"tp x pp x dp x cp must be the {run.gpus} devices, but is {product}")
        if run.gpus > run.gpus_per_node and run.gpus % run.gpus_per_node:
            raise self._error("gpus", f"{run.gpus} is not a multiple of gpus_per_node, {run.gpus_per_node}")
        if run.gbs % (run.dp * run.mbs):
            raise self._error("gbs", f"{run.gbs} is not a multiple of dp x mbs = {run.dp * run.mbs}")
        if run.pp * run.vpp > run.layers:
            raise self._error("pp", f"pp x vpp = {run.pp * run.vpp} exceeds the {run.layers} layers")
        if run.vpp > 1 and run.pp == 1:
            raise self._error("vpp", "interleaving needs a pipeline: pp must be at least 2, or vpp 1")

    def _text(self, column: str) -> str:
        text = str(self.cells.get(column) or "").strip()
        if text:
            return text
        if column in DEFAULTS:
            return str(DEFAULTS[column])
        raise self._error(column, "is empty and has no default")

    def _choice(self, column: str) -> str:
        return self._checked(column, one_of(*CHOICES[column]), self._text(column))

    def _count(self, column: str, default: int | None = None) -> int:
        if default is not None and not str(self.cells.get(column) or "").strip():
            return default
        return self._checked(column, _COUNT, self._text(column))

    def _measure(self, column: str) -> float | None:
        text = str(self.cells.get(column) or "").strip()
        return self._checked(column, _MEASURE, text) if text else None

    def _checked(self, column: str, kind: Kind, text: str) -> Any:
        return check(kind, column, text, place=f"{self.path}, run {self.id}, column ")

    def _error(self, column: str, what: str) -> TunerError:
        return TunerError(f"{self.path}, run {self.id}, column {column}: {what}")
