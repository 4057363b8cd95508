"""The folder of a checkpoint: written completely or not at all, and read without executing anything.

Rank 0 writes ``index.json`` last, from each rank's description of its own file. Until the folder is moved to its final path, it
is called ``NAME.partial``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.file_schema import problem
from paddle_rbt_plugin.handover.checkpoint.held import Held
from paddle_rbt_plugin.handover.pir.engine_outputs import Layout, dygraph

VERSION = 1
_INDEX = "index.json"


@dataclass(frozen=True)
class Saved:
    """A tensor of a checkpoint: the start, the size and the file of each of its parts."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class Index:
    """A complete checkpoint and its index."""

    path: Path
    tensors: dict[str, Saved]
    described: dict[str, Any]

    def read(self, name: str, layout: Layout) -> np.ndarray:
        """The part of a tensor that this rank holds. Raises TunerError for a damaged file."""
        saved = self.tensors[name]
        part = layout.part(dist.get_rank())
        begin, end = [s.start for s in part], [s.stop for s in part]
        found = np.empty([e - b for b, e in zip(begin, end, strict=True)], _stored(saved.dtype))
        filled = 0
        for file, offset, shape in saved.pieces:
            low = [max(b, o) for b, o in zip(begin, offset, strict=True)]
            high = [min(e, o + n) for e, o, n in zip(end, offset, shape, strict=True)]
            if any(lo >= hi for lo, hi in zip(low, high, strict=True)):
                continue
            source = tuple(slice(lo - o, hi - o) for lo, hi, o in zip(low, high, offset, strict=True))
            target = tuple(slice(lo - b, hi - b) for lo, hi, b in zip(low, high, begin, strict=True))
            found[target] = self._piece(file, name, source)
            filled += found[target].size
        if filled != found.size:
            raise TunerError(f"the checkpoint {str(self.path)!r} is damaged: parts of {name} are missing")
        return found

    def _piece(self, file: str, name: str, part: tuple[slice, ...]) -> np.ndarray:
        try:
            with safe_open(self.path / file, framework="np") as tensors:
                return np.asarray(tensors.get_slice(name)[part] if part else tensors.get_tensor(name))
        except (SafetensorError, OSError, ValueError, IndexError, TypeError) as error:
            raise TunerError(f"the checkpoint {str(self.path)!r} is damaged: {file}: {error}") from error


def write(path: str | os.PathLike[str], tensors: Iterable[Held], described: dict[str, Any]) -> None:
    """Writes a checkpoint of the tensors that this rank holds. Raises TunerError on every rank if one cannot write."""
    place = common_path(path)
    partial = place.with_name(place.name + ".partial")
    rank = dist.get_rank()

    def begin() -> None:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def write_own() -> None:
        if not partial.is_dir():
            raise TunerError(f"rank {rank} cannot see {str(partial)!r}: all ranks must write to the same file system")
        owned = {t.name: t for t in tensors if t.layout.owns(rank)}
        save_file({name: np.ascontiguousarray(t.read()) for name, t in owned.items()}, partial / _file(rank))
        pieces = {name: _described(t, rank) for name, t in owned.items()}
        _write_json(partial / f"rank{rank}.json", pieces)

    def finish() -> None:
        if rank != 0:
            return
        index = {"format": "paddle-rbt checkpoint", "version": VERSION, **described, "tensors": {}, "files": {}}
        for other in range(dist.get_world_size()):
            pieces = json.loads((partial / f"rank{other}.json").read_text(encoding="utf-8"))
            (partial / f"rank{other}.json").unlink()
            index["files"][_file(other)] = (partial / _file(other)).stat().st_size
            for name, piece in pieces.items():
                known = index["tensors"].setdefault(name, {"shape": piece["shape"], "dtype": piece["dtype"], "pieces": []})
                if all(p["begin"] != piece["begin"] for p in known["pieces"]):  # two stages may hold a tied weight
                    known["pieces"].append({"file": _file(other), "begin": piece["begin"], "shape": piece["size"]})
        _write_json(partial / _INDEX, index)
        _replace(partial, place)

    for step in (begin, write_own, finish):
        _together(step, place)


def read_index(path: str | os.PathLike[str]) -> Index:
    """The index of a checkpoint. Raises TunerError for a folder that is not a complete checkpoint."""
    folder = common_path(path)
    try:
        data = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    except OSError as error:
        raise TunerError(f"{str(path)!r} is not a checkpoint: {_INDEX}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TunerError(f"{str(path)!r} is not a checkpoint: {_INDEX} is not JSON") from error
    if isinstance(data, dict) and isinstance(data.get("version"), int) and data["version"] != VERSION:
        raise TunerError(
            f"the checkpoint {str(path)!r} has version {data['version']}, but this package reads version {VERSION}"
        )
    if wrong := problem("paddle_rbt_plugin.handover.checkpoint", "schema.json", data):
        raise TunerError(f"{str(path)!r} is not a checkpoint: {wrong}")
    for file, size in data["files"].items():
        if Path(file).name != file or not (folder / file).is_file() or (folder / file).stat().st_size != size:
            raise TunerError(f"the checkpoint {str(path)!r} is incomplete: {file} is missing or has the wrong size")
    tensors = {}
    for name, tensor in data["tensors"].items():
        dims = len(tensor["shape"])
        pieces = [(p["file"], tuple(p["begin"]), tuple(p["shape"])) for p in tensor["pieces"]]
        if any(p[0] not in data["files"] or len(p[1]) != dims or len(p[2]) != dims for p in pieces):
            raise TunerError(f"the checkpoint {str(path)!r} is damaged: the parts of {name}")
        tensors[name] = Saved(tuple(tensor["shape"]), tensor["dtype"], tuple(pieces))
    return Index(folder, tensors, {key: data[key] for key in ("optimizer", "schedule", "random", "extra")})


def common_path(path: str | os.PathLike[str]) -> Path:
    """The path of rank 0, on all ranks."""
    if dist.get_world_size() < 2:
        return Path(path)
    with dygraph():
        own = np.frombuffer(os.fsencode(path), "uint8")
        size = paddle.to_tensor([own.size], dtype="int64")
        dist.broadcast(size, src=0)
        text = paddle.to_tensor(np.resize(own, int(size.item())).astype("int32"))
        dist.broadcast(text, src=0)
        return Path(os.fsdecode(text.numpy().astype("uint8").tobytes()))


def converted(array: np.ndarray, source: str, target: str) -> np.ndarray:
    """An array converted to another type; bfloat16 is represented by its bits."""
    if source == target:
        return array
    wide = (array.astype("uint32") << 16).view("float32") if source == "bfloat16" else array
    if target != "bfloat16":
        return wide.astype(target)
    with paddle.base.dygraph.guard(paddle.CPUPlace()):
        return np.asarray(paddle.to_tensor(wide.astype("float32")).astype("bfloat16").numpy())


def _stored(dtype: str) -> str:
    return "uint16" if dtype == "bfloat16" else dtype


def _file(rank: int) -> str:
    return f"rank{rank}.safetensors"


def _described(tensor: Held, rank: int) -> dict[str, Any]:
    part = tensor.layout.part(rank)
    return {
        "shape": list(tensor.layout.shape),
        "dtype": tensor.dtype,
        "begin": [s.start for s in part],
        "size": [s.stop - s.start for s in part],
    }


def _write_json(path: Path, data: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())


def _replace(partial: Path, place: Path) -> None:
    """Moves a complete checkpoint to its final path. If the process ends in between, the old one remains as ``NAME.old``."""
    old = place.with_name(place.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    partial.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _together(step: Callable[[], None], place: Path) -> None:
    """Runs a step on every rank, and continues only if it succeeded on all of them."""
    error: Exception | None = None
    try:
        step()
    except (OSError, SafetensorError, TunerError) as caught:
        error = caught
    failed = False
    if dist.get_world_size() > 1:
        with dygraph():
            count = paddle.to_tensor(int(error is not None), dtype="int64")
            dist.all_reduce(count)
            failed = int(count) > 0
    if error is not None:
        raise TunerError(f"the checkpoint {str(place)!r} cannot be written: {error}") from error
    if failed:
        raise TunerError(f"the checkpoint {str(place)!r} cannot be written: another rank failed, see its log")
