"""The methods of engines for PIR programs: ``fit``, ``evaluate``, ``predict`` and ``run``, in any order and any number of
times, with the results of a serial run on every rank.

- ``fit`` trains on the batches of a serial run and drops an incomplete last batch. It reports the loss of the whole batch, and
  a learning-rate schedule advances once per batch, however many micro batches it has. Metrics are computed only if a batch is
  not cut into micro batches.
- ``evaluate`` reads the whole dataset. Loss and metrics are those of the dataset: the mean of the batch losses, weighted by
  batch size.
- ``predict`` returns, for each batch in the order of the dataset, the list of the model's outputs, complete on every rank.
- Evaluation and prediction run without accumulation and without a pipeline's schedule; the last batch may be smaller.

Paddle's own methods read the contexts of legacy programs, which PIR leaves empty. Apart from that, a second ``fit``,
``evaluate`` after ``fit``, ``predict`` and ``save`` fail, ``steps`` runs one step too many, and each rank reports only what it
saw last itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle.distributed.auto_parallel.static.callbacks import config_callbacks
from paddle.distributed.auto_parallel.static.engine import Engine

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover import checkpoint
from paddle_rbt_plugin.handover.engine import inference
from paddle_rbt_plugin.handover.pir import engine_programs
from paddle_rbt_plugin.handover.pir.engine_data import Batch, Reader, engine_specs, inputs_of_prediction, spec_of
from paddle_rbt_plugin.handover.pir.engine_outputs import Layout, dygraph, whole
from paddle_rbt_plugin.handover.pir.engine_programs import Prepared, current, fetches, inner, ready
from paddle_rbt_plugin.patching import ENGINES_OF_SCRIPTS, Attribute, Setting, paddle_change


@paddle_change(">=3.0,<3.4", permanent=ENGINES_OF_SCRIPTS)
def engine_lives_in_pir() -> Iterator[Setting]:
    """Replaces the methods of engines for PIR programs; engines for legacy programs keep Paddle's.

    Reason: Paddle's methods read the contexts of legacy programs, which PIR leaves empty; apart from that, a second ``fit``,
    ``evaluate`` after ``fit``, ``predict`` and ``save`` fail.
    """
    replacements: dict[str, Callable[..., Any]] = {
        "fit": fit,
        "evaluate": evaluate,
        "predict": predict,
        "run": run,
        "save": save,
        "load": load,
        "_switch_mode": _switch_mode,
        "_prepare_dataloader": _dataloader,
        "_prepare_logger": _no_logs,
        "_prepare_reader": _no_reader,
    }
    for name, replacement in replacements.items():
        yield Attribute(Engine, name, _in_pir(getattr(Engine, name), replacement))
    optimizer = property(_in_pir(Engine.optimizer.fget, lambda engine: inner(engine._optimizer)))
    yield Attribute(Engine, "optimizer", optimizer)


def _in_pir(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(engine: Any, *args: Any, **kwargs: Any) -> Any:
        return (replacement if engine._in_pir_mode else original)(engine, *args, **kwargs)

    return method


@contextmanager
def unscheduled(engine: Any, mode: str) -> Iterator[None]:
    """Makes each rank run a program without a backward pass as it is, without the jobs of a pipeline."""
    pipeline = engine._strategy.pipeline
    enabled, pipeline.enable = pipeline.enable, bool(pipeline.enable and mode == "train")
    try:
        yield
    finally:
        pipeline.enable = enabled


def fit(
    engine: Any,
    train_data: Any,
    train_sample_split: int | None = None,
    batch_size: int | None = 1,
    epochs: int = 1,
    steps_per_epoch: int | None = None,
    log_freq: int = 10,
    save_dir: str | None = None,
    save_freq: int = 1,
    valid_data: Any = None,
    valid_sample_split: int | None = None,
    valid_freq: int = 1,
    valid_steps: int | None = None,
    collate_fn: Any = None,
    callbacks: Any = None,
    verbose: int = 2,
    nvprof_range: Any = (-1, -1),
) -> Any:
    """``Engine.fit``. Raises TunerError for a dataset that does not fill one batch."""
    prepared = _prepared_for(engine, "train", train_data, train_sample_split, batch_size)
    reader = _reader(engine, collate_fn)
    steps = reader.count(train_data, batch_size, whole=False)
    if steps == 0:
        raise TunerError(f"the dataset of {len(train_data)} samples does not fill one batch of {batch_size}")
    steps = steps if steps_per_epoch is None else steps_per_epoch if steps is None else min(steps, steps_per_epoch)
    calls = config_callbacks(
        callbacks, engine=engine, batch_size=batch_size, epochs=epochs, steps=steps, log_freq=log_freq, save_freq=save_freq,
        save_dir=save_dir, verbose=verbose, metrics=engine._metrics_name(), acc_step=1,
    )  # fmt: skip
    calls.on_begin("train")
    for epoch in range(epochs):
        logs: dict[str, Any] = {}
        calls.on_epoch_begin(epoch)
        for step, batch in enumerate(_first(reader.batches(train_data, batch_size, whole=False), steps)):
            with paddle.profiler.utils._nvprof_range(iter_id=step, start=nvprof_range[0], end=nvprof_range[1]):
                calls.on_batch_begin("train", step, logs)
                logs = {"epoch": epoch, "step": step + 1, "lr": float(inner(engine._optimizer).get_lr())}
                logs |= _step(engine, prepared, batch)
                calls.on_batch_end("train", step, logs)
        if valid_data is not None and (epoch + 1) % valid_freq == 0:
            found = evaluate(
                engine, valid_data, valid_sample_split, batch_size, valid_steps, log_freq, collate_fn, callbacks, verbose
            )
            logs |= {f"val_{name}": value for name, value in found.items()}
            engine_programs.activate(engine, prepared)
        engine._reset_metrics()
        calls.on_epoch_end(epoch, logs)
    calls.on_end("train", logs)
    return engine.history


def evaluate(
    engine: Any,
    valid_data: Any,
    valid_sample_split: int | None = None,
    batch_size: int | None = 1,
    steps: int | None = None,
    log_freq: int = 10,
    collate_fn: Any = None,
    callbacks: Any = None,
    verbose: int = 2,
) -> dict[str, Any]:
    """``Engine.evaluate``: the loss and the metrics of the dataset, or of its first ``steps`` batches."""
    full = _prepared_for(engine, "eval", valid_data, valid_sample_split, batch_size)
    reader = _reader(engine, collate_fn)
    count = reader.count(valid_data, batch_size, whole=True)
    count = count if steps is None else steps if count is None else min(count, steps)
    calls = config_callbacks(
        callbacks, engine=engine, batch_size=batch_size, log_freq=log_freq, verbose=verbose, metrics=engine._metrics_name()
    )
    engine._reset_metrics()
    calls.on_begin("eval", {"steps": count, "metrics": engine._metrics_name()})
    logs: dict[str, Any] = {}
    total, samples = 0.0, 0
    for step, batch in enumerate(_first(reader.batches(valid_data, batch_size, whole=True), count)):
        calls.on_batch_begin("eval", step, logs)
        logs = {"step": step + 1} | _step(engine, _for_size(engine, full, batch), batch)
        total, samples = total + float(logs["loss"]) * batch.size, samples + batch.size
        calls.on_batch_end("eval", step, logs)
    logs = {name: value for name, value in logs.items() if name != "step"} | ({"loss": total / samples} if samples else {})
    engine_programs.activate(engine, full)
    calls.on_end("eval", logs)
    engine._reset_metrics()
    return logs


def predict(
    engine: Any,
    test_data: Any,
    test_sample_split: int | None = None,
    batch_size: int | None = 1,
    steps: int | None = None,
    collate_fn: Any = None,
    callbacks: Any = None,
    verbose: int = 2,
) -> list[list[np.ndarray]]:
    """``Engine.predict``: for each batch of the dataset, or of its first ``steps`` batches, the list of complete outputs."""
    inputs = inputs_of_prediction(engine, test_data, test_sample_split)
    specs = [spec_of(value, name, batch_size) for value, name in zip(inputs, _names(engine, len(inputs)), strict=True)]
    full = ready(engine, "predict", specs, [])
    reader = _reader(engine, collate_fn)
    count = reader.count(test_data, batch_size, whole=True)
    count = count if steps is None else steps if count is None else min(count, steps)
    calls = config_callbacks(callbacks, engine=engine, verbose=verbose)
    calls.on_begin("predict", {"steps": count})
    logs: dict[str, Any] = {}
    found = []
    for step, batch in enumerate(_first(reader.batches(test_data, batch_size, whole=True), count)):
        calls.on_batch_begin("predict", step, logs)
        outputs = _outputs(engine, _for_size(engine, full, batch), batch.feed)
        found.append(list(outputs.values()))
        logs = {"step": step + 1, "outputs": {f"out{i}": value for i, value in enumerate(found[-1])}}
        calls.on_batch_end("predict", step, logs)
    engine_programs.activate(engine, full)
    calls.on_end("predict", logs)
    return found


def run(engine: Any, data: Any = None, feed: Any = None, fetch_list: Any = None, mode: str | None = None) -> dict[str, Any]:
    """``Engine.run``: the loss of the whole batch on every rank, one loss per micro batch; in prediction, all outputs."""
    if mode is not None:
        engine.to_mode(mode)
    prepared = current(engine, engine._mode)
    if prepared is None:
        raise TunerError(
            f"the engine is not prepared to run in mode {engine._mode!r}; call prepare(..., mode={engine._mode!r})"
        )
    fed = engine._prepare_feed(data, feed, engine._mode)
    if prepared.mode == "predict":
        outputs = _outputs(engine, prepared, fed)
        return {"outputs": {f"out{i}": value for i, value in enumerate(outputs.values())}}
    engine._executor.enable_job_schedule_profiler = engine.enable_job_schedule_profiler
    named = dict(zip(engine._pir_user_defined_fetch_names, engine._pir_fetch_values, strict=True))
    made, extra = _execute(engine, prepared, fed, prepared.loss_names, list(named.values()))
    loss = whole(prepared.loss, made.get(prepared.loss_names[0])) if prepared.loss is not None else None
    return {"outputs": loss, "loss": loss} | dict(zip(named, extra, strict=True))


def save(engine: Any, path: str, training: bool = True) -> None:
    """``Engine.save``: writes a checkpoint (see ``checkpoint``) to the folder ``path``; without ``training``, writes the serial
    model for prediction, like ``paddle.jit.save``."""
    if training:
        checkpoint.save_checkpoint(path, engine)
    else:
        inference.save(engine, path)


def load(engine: Any, path: str, strict: bool = True, load_optimizer: bool = True) -> dict[str, Any]:
    """``Engine.load``: loads a checkpoint saved under any plan, before or after the engine is prepared."""
    return checkpoint.load_checkpoint(path, engine, strict=strict, with_optimizer=load_optimizer)


def _execute(
    engine: Any, prepared: Prepared, feed: Any, names: list[str], others: list[Any]
) -> tuple[dict[str, Any], list[Any]]:
    """Runs a program; returns this rank's parts of the named outputs that it computes, and other values."""
    values = fetches(prepared, names)
    found = engine._executor.run(
        prepared.main, feed=feed, fetch_list=[*values.values(), *others], return_numpy=engine._strategy.return_numpy
    )
    return dict(zip(values, found, strict=False)), list(found[len(values) :])


def _outputs(engine: Any, prepared: Prepared, feed: Any) -> dict[str, np.ndarray]:
    made, _ = _execute(engine, prepared, feed, list(prepared.outputs), [])
    return {name: whole(layout, made.get(name)) for name, layout in prepared.outputs.items()}


def _step(engine: Any, prepared: Prepared, batch: Batch) -> dict[str, Any]:
    """Runs a batch of training or evaluation; returns its loss, and the metrics since they were last reset."""
    logs: dict[str, Any] = {}
    measured = engine._metrics and prepared.jobs is None  # jobs return the outputs of micro batches
    made, _ = _execute(engine, prepared, batch.feed, [*prepared.loss_names, *(prepared.outputs if measured else ())], [])
    if prepared.loss is not None:
        logs["loss"] = np.mean(whole(prepared.loss, made.get(prepared.loss_names[0])))  # of the micro batches
    if measured:
        outputs = [whole(layout, made.get(name)) for name, layout in prepared.outputs.items()]
        labels = [whole(_rows(engine, batch, batch.feed[spec.name]), batch.feed[spec.name]) for spec in prepared.labels_spec]
        with dygraph():
            tensors = [paddle.to_tensor(value) for value in (*outputs, *labels)]
            for metric in engine._metrics:
                computed = metric.compute(*tensors)
                metric.update(*(v.numpy() for v in (computed if isinstance(computed, (list, tuple)) else [computed])))
                names, values = (v if isinstance(v, (list, tuple)) else [v] for v in (metric.name(), metric.accumulate()))
                logs |= dict(zip(names, values, strict=True))
    return logs


def _rows(engine: Any, batch: Batch, part: Any) -> Layout:
    """How the rows of a batch are distributed over the ranks that read them."""
    mesh = engine.rule_based_mesh
    at = mesh.axes.index("dp") if "dp" in mesh.axes and batch.divided else -1
    return Layout((batch.size, *np.shape(part)[1:]), tuple(mesh.ranks), tuple(mesh.shape), (at, *(-1,) * (np.ndim(part) - 1)))


def _prepared_for(engine: Any, mode: str, data: Any, split: int | None, size: int | None) -> Prepared:
    """The program of training or evaluation for full batches of a dataset."""
    steps = engine._acc_steps
    if mode == "eval":  # it reads a batch as it is
        engine._acc_steps = 1
    try:
        inputs, labels = engine._prepare_data_spec(data, split, size)
    finally:
        engine._acc_steps = steps
    names = _names(engine, len(inputs), len(labels))
    for spec, name in zip((*inputs, *labels), names, strict=True):
        spec.name = name
    return ready(engine, mode, inputs, labels)


def _names(engine: Any, inputs: int, labels: int = 0) -> list[str]:
    """The names of inputs and labels: those with which the engine was prepared, else Paddle's."""
    for known_inputs, known_labels in engine_specs(engine).values():
        if len(known_inputs) == inputs and (len(known_labels) == labels or not labels):
            return [spec.name for spec in (*known_inputs, *known_labels[:labels])]
    return [*(f"input{i}" for i in range(inputs)), *(f"label{i}" for i in range(labels))]


def _for_size(engine: Any, full: Prepared, batch: Batch) -> Prepared:
    """The program for the size of a batch, which may be a smaller last batch."""
    size = full.inputs_spec[0].shape[0]
    if batch.size == size and batch.divided:
        engine_programs.activate(engine, full)
        return full

    def sized(specs: list[Any]) -> list[Any]:
        return [paddle.static.InputSpec([batch.size, *spec.shape[1:]], spec.dtype, spec.name) for spec in specs]

    return ready(engine, full.mode, sized(full.inputs_spec), sized(full.labels_spec), replicated=not batch.divided)


def _reader(engine: Any, collate_fn: Any = None, num_workers: int = 0) -> Reader:
    names = tuple(engine.get_feed_name_list())
    replicas, rank = getattr(engine, "_dp_world_sizes", None) or [1], getattr(engine, "_dp_ranks", None) or [0]
    return Reader(names, replicas[0], rank[0], collate_fn, num_workers)


def _first(batches: Iterator[Batch], count: int | None) -> Iterator[Batch]:
    for i, batch in enumerate(batches):
        yield batch
        if i + 1 == count:
            return


def _switch_mode(engine: Any, mode: str) -> None:
    engine.to_mode(mode)


def _no_logs(engine: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {}


def _no_reader(engine: Any, feed_list: Any = ()) -> None:
    """Paddle's method would look for the reader ops of legacy programs."""


class _Loader:
    """What ``Engine.dataloader`` returns: an iterable of the batches that the engine feeds; each iteration is another epoch."""

    def __init__(self, reader: Reader, dataset: Any, size: int | None, whole: bool, shuffle: bool, loader: dict[str, Any]):
        self.reader, self.dataset, self.size, self.whole, self.shuffle, self.loader = (
            reader,
            dataset,
            size,
            whole,
            shuffle,
            loader,
        )
        self.epoch = 0

    def __len__(self) -> int:
        count = self.reader.count(self.dataset, self.size, self.whole)
        if count is None:
            raise TypeError("the length of an iterable dataset is not known")
        return count

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        self.epoch += 1
        for batch in self.reader.batches(self.dataset, self.size, self.whole, self.shuffle, self.epoch - 1, **self.loader):
            yield [batch.feed]


def _dataloader(
    engine: Any,
    dataset: Any,
    return_list: bool = True,
    batch_size: int | None = 1,
    shuffle: bool = False,
    drop_last: bool = True,
    collate_fn: Any = None,
    num_workers: int = 0,
    timeout: int = 0,
    worker_init_fn: Any = None,
    **_: Any,
) -> _Loader:
    """Replaces ``_prepare_dataloader``; Paddle gives the batch size of a rank."""
    reader = _reader(engine, collate_fn, num_workers)
    size = None if batch_size is None else batch_size * reader.replicas
    return _Loader(reader, dataset, size, not drop_last, shuffle, {"timeout": timeout, "worker_init_fn": worker_init_fn})
