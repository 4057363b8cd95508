"""What an engine reads of a dataset: the specs of its inputs and labels, and this rank's part of every batch.

The batches are those that a single process would read, in the same order; the ranks along ``dp`` take consecutive rows of each.
Training drops a last batch that is not full. Evaluation and prediction read all samples: the last, smaller batch is divided
where ``dp`` divides it, and read whole by every rank where it does not.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from paddle_rbt_plugin.errors import TunerError


@dataclass(frozen=True)
class Batch:
    """A batch of ``size`` samples: what this rank feeds by name, its part or all of it (``divided`` is False)."""

    size: int
    divided: bool
    feed: dict[str, Any]


@dataclass(frozen=True)
class Reader:
    """Reads a dataset for one rank: ``names`` are the feeds, inputs first; ``replicas`` and ``rank`` those along dp."""

    names: tuple[str, ...]
    replicas: int
    rank: int
    collate_fn: Any = None
    num_workers: int = 0

    def batches(
        self, dataset: Any, size: int | None, whole: bool, shuffle: bool = False, epoch: int = 0, **loader: Any
    ) -> Iterator[Batch]:
        """The batches of a dataset, of ``size`` samples, or as the dataset holds them (None). ``whole`` reads the last samples,
        too, fewer than a batch. ``loader`` are further arguments of ``paddle.io.DataLoader``.

        Raises TunerError for a batch that dp does not divide, where it has to be divided."""
        if size is not None and size % self.replicas:
            raise TunerError(f"batch_size {size} cannot be divided over the {self.replicas} data-parallel ranks of the plan")
        if isinstance(dataset, paddle.io.IterableDataset) or size is None:
            yield from self._stream(dataset, size, whole)
            return
        order = np.arange(len(dataset))
        if shuffle:
            np.random.RandomState(epoch).shuffle(order)
        ends = range(0, len(order), size)
        chunks = [order[i : i + size] for i in ends if whole or i + size <= len(order)]
        parts = [[int(i) for i in self._part(chunk)] for chunk in chunks]
        read = paddle.io.DataLoader(
            dataset,
            batch_sampler=parts,
            collate_fn=self._feed,
            num_workers=self.num_workers,
            places=paddle.CPUPlace(),
            **loader,
        )
        for chunk, (feed,) in zip(chunks, read, strict=True):
            arrays = {name: np.asarray(value) for name, value in feed.items()}
            yield Batch(len(chunk), self._divides(len(chunk)), arrays)

    def count(self, dataset: Any, size: int | None, whole: bool) -> int | None:
        """How many batches there are; None where only reading them tells."""
        if isinstance(dataset, paddle.io.IterableDataset):
            return None
        full, rest = divmod(len(dataset), size or 1)
        return full + bool(whole and rest)

    def _stream(self, dataset: Any, size: int | None, whole: bool) -> Iterator[Batch]:
        samples = iter(dataset) if isinstance(dataset, paddle.io.IterableDataset) else (dataset[i] for i in range(len(dataset)))
        if size is None:
            for sample in samples:
                columns = [np.asarray(part) for part in flat(sample)]
                divided = self._divides(len(columns[0]))
                rows = [self._part(column) if divided else column for column in columns]
                yield Batch(len(columns[0]), divided, dict(zip(self.names, rows, strict=False)))
            return
        while (chunk := list(itertools.islice(samples, size))) and (whole or len(chunk) == size):
            yield Batch(len(chunk), self._divides(len(chunk)), self._feed(self._part(chunk))[0])

    def _divides(self, size: int) -> bool:
        return size % self.replicas == 0

    def _part(self, chunk: Any) -> Any:
        """This rank's rows of a batch; all of them where they cannot be divided."""
        if not self._divides(len(chunk)):
            return chunk
        rows = len(chunk) // self.replicas
        return chunk[self.rank * rows : (self.rank + 1) * rows]

    def _feed(self, samples: Sequence[Any]) -> list[dict[str, Any]]:
        """Samples as one dict of arrays by feed name, in a list, as the engine feeds it."""
        if self.collate_fn is not None:
            columns = [np.asarray(part) for part in flat(self.collate_fn(list(samples)))]
        else:
            columns = [np.stack([np.asarray(v) for v in column]) for column in zip(*map(flat, samples), strict=True)]
        if len(columns) < len(self.names):
            raise TunerError(
                f"a sample has {len(columns)} parts, but the program reads {len(self.names)}: {', '.join(self.names)}"
            )
        return [dict(zip(self.names, columns, strict=False))]


def flat(sample: Any) -> list[Any]:
    """The tensors of a sample, nested as it may be."""
    if isinstance(sample, dict):
        return [part for item in sample.values() for part in flat(item)]
    if isinstance(sample, (list, tuple)):
        return [part for item in sample for part in flat(item)]
    return [sample]


def inputs_of_prediction(engine: Any, dataset: Any, split: int | None) -> list[Any]:
    """What the model reads of the first sample of a dataset to predict on, which may have labels or none.

    Raises TunerError where that cannot be told."""
    sample = next(iter(dataset)) if isinstance(dataset, paddle.io.IterableDataset) else dataset[0]
    if split is not None:
        return flat(list(sample.values() if isinstance(sample, dict) else sample)[:split])
    parts, wanted = flat(sample), _inputs_wanted(engine)
    if not isinstance(sample, (list, tuple, dict)) or len(parts) == 1:
        return parts
    first = flat(next(iter(sample.values())) if isinstance(sample, dict) else sample[0])
    if wanted is None:
        return first if len(sample) == 2 else parts
    if len(parts) < wanted:
        raise TunerError(f"a sample of the test data has {len(parts)} parts, but the model reads {wanted}")
    return first if len(first) == wanted else parts[:wanted]


def _inputs_wanted(engine: Any) -> int | None:
    """How many inputs the model reads: as many as in training, or as its forward function needs."""
    for mode in ("train", "eval"):
        if specs := engine_specs(engine).get(mode):
            return len(specs[0])
    try:
        parameters = inspect.signature(getattr(engine._model, "forward", engine._model)).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def engine_specs(engine: Any) -> dict[str, tuple[list[Any], list[Any]]]:
    """By mode, the specs of inputs and labels that the engine was last prepared with."""
    found: dict[str, tuple[list[Any], list[Any]]] = vars(engine).setdefault("rule_based_specs", {})
    return found


def spec_of(value: Any, name: str, size: int | None) -> Any:
    """The spec of a part of a sample, in batches of ``size``, or as it is (None)."""
    array = np.asarray(value)
    shape = list(array.shape) if size is None else [size, *array.shape]
    dtype = "float32" if isinstance(value, float) else str(value.dtype).rpartition(".")[2] if hasattr(value, "dtype") else None
    return paddle.static.InputSpec(shape, dtype or str(array.dtype), name)
