"""The programs of an engine in PIR: one for each mode and size of batch, prepared when it is first needed.

Paddle prepares one program per mode, whatever is fed to it later, keeps one executor with the jobs of training, which
evaluation runs, too, and initializes parameters for training only. Here each program has the executor, names and specs that
belong to it, and ``activate`` puts them where the methods of the engine look for them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle.distributed.auto_parallel.static.engine import Engine
from paddle.distributed.auto_parallel.static.helper import ProxyLayer

from paddle_rbt_plugin.handover.pir.engine_data import engine_specs
from paddle_rbt_plugin.handover.pir.engine_outputs import Layout
from paddle_rbt_plugin.handover.pir.first_plan import plan_before_training
from paddle_rbt_plugin.handover.pir.native import engines_trace_natively, traces_record_apart
from paddle_rbt_plugin.handover.shared.engine_state import engine_plan
from paddle_rbt_plugin.handover.shared.strategy import is_enabled
from paddle_rbt_plugin.patching import ENGINES_OF_SCRIPTS, Attribute, Setting, paddle_change

_PROGRAMS, _CURRENT = "rule_based_programs", "rule_based_current"
REPLICATED = "rule_based_replicated"
"""The attribute of an engine that says, while it is true, that every rank reads whole batches."""


@dataclass(frozen=True)
class Prepared:
    """A program that an engine has prepared, and what belongs to it."""

    mode: str
    main: Any
    distributed: Any
    startup: Any
    forward: Any
    jobs: Any
    executor: Any
    optimizer: Any
    inputs_spec: list[Any]
    labels_spec: list[Any]
    loss_names: list[str]
    loss: Layout | None
    outputs: dict[str, Layout]

    @property
    def shapes(self) -> tuple[Any, ...]:
        """What it reads."""
        return shapes_of(self.inputs_spec, self.labels_spec)


def shapes_of(inputs_spec: list[Any], labels_spec: list[Any]) -> tuple[Any, ...]:
    """Shapes and types of a program's inputs and labels; programs that read the same are one."""
    return tuple((tuple(spec.shape), str(spec.dtype)) for spec in (*inputs_spec, *labels_spec))


@paddle_change(">=3.0,<3.4", permanent=ENGINES_OF_SCRIPTS)
def engine_keeps_programs(tune: Callable[[Any, str], Any], resume: Callable[[Any, str], None]) -> Iterator[Setting]:
    """Wraps the engine where it prepares a program, where it changes between modes, and where it marks outputs.

    ``tune`` plans the program of an engine in a mode; ``resume`` is called when it is prepared.

    Reason: Paddle prepares one program per mode whatever is fed to it later, lets evaluation run the jobs of training, and
    initializes parameters for training only.
    """
    prepare, to_mode = Engine._prepare_program, Engine.to_mode

    @functools.wraps(prepare)
    def prepare_program(engine: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
        if not engine._in_pir_mode:
            return prepare(engine, mode, *args, **kwargs)
        traced = engines_trace_natively if is_enabled(engine._strategy.tuning) else traces_record_apart
        with outputs_marked.apply(), traced.apply():
            return prepare_in_pir(engine, mode, *args, **kwargs)

    def prepare_in_pir(engine: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
        if mode != "train" and is_enabled(engine._strategy.tuning) and engine_plan(engine) is None:
            plan_before_training(engine, mode, tune)
        result = _prepare(functools.partial(prepare, engine, mode, *args, **kwargs), engine, mode)
        resume(engine, mode)
        return result

    @functools.wraps(to_mode)
    def change_mode(engine: Any, mode: str) -> None:
        to_mode(engine, mode)
        if current := vars(engine).get(_CURRENT, {}).get(mode):
            activate(engine, current)

    yield Attribute(Engine, "_prepare_program", prepare_program)
    yield Attribute(Engine, "to_mode", change_mode)


@paddle_change(">=3.0,<3.4")
def outputs_marked() -> Iterator[Setting]:
    """Lets the programs of engines return what metrics and prediction read.

    Reason: Paddle keeps the loss alone, so that ``predict`` returns empty lists and metrics read nothing.
    """
    yield Attribute(ProxyLayer, "append_loss_to_shadow_output", _mark_loss)
    yield Attribute(ProxyLayer, "call_metrics", _metrics_of_legacy_programs(ProxyLayer.call_metrics))
    yield Attribute(ProxyLayer, "_predict", _predict)


def ready(engine: Any, mode: str, inputs_spec: list[Any], labels_spec: list[Any], replicated: bool = False) -> Prepared:
    """The program of a mode for these specs, prepared if it is not yet, and activated."""
    programs = vars(engine).setdefault(_PROGRAMS, {})
    key = (mode, replicated, shapes_of(inputs_spec, labels_spec))
    if key not in programs:
        engine._inputs_spec, engine._labels_spec = inputs_spec, labels_spec
        setattr(engine, REPLICATED, replicated)
        try:
            engine._prepare_program(mode)
        finally:
            setattr(engine, REPLICATED, False)
        programs[key] = vars(engine)[_CURRENT][mode]
    activate(engine, programs[key])
    found: Prepared = programs[key]
    return found


def current(engine: Any, mode: str) -> Prepared | None:
    """The program of a mode that was activated last."""
    found: Prepared | None = vars(engine).get(_CURRENT, {}).get(mode)
    return found


def activate(engine: Any, prepared: Prepared) -> None:
    """Puts a program where the engine's methods look for it. Optimizer states go from one program of training to the next."""
    mode = prepared.mode
    before = vars(engine).setdefault(_CURRENT, {}).get(mode)
    vars(engine)[_CURRENT][mode] = prepared
    if before is not None and before is not prepared and mode == "train":
        _carry_states(before.optimizer, prepared.optimizer)
    if prepared.optimizer is not None:
        engine._optimizer = prepared.optimizer
    engine._mode = mode
    engine._pir_dense_main_progs[mode], engine._pir_dist_main_progs[mode] = prepared.main, prepared.distributed
    engine._pir_dist_startup_progs[mode], engine._fwd_main_progs[mode] = prepared.startup, prepared.forward
    engine._job_plan, engine._executor = prepared.jobs, prepared.executor
    engine._inputs_spec, engine._labels_spec = prepared.inputs_spec, prepared.labels_spec
    engine._loss_names = prepared.loss_names
    engine_specs(engine)[mode] = (prepared.inputs_spec, prepared.labels_spec)


def _prepare(prepare: Any, engine: Any, mode: str) -> Any:
    known = current(engine, mode)
    if mode == "train" and known is not None:  # Paddle cannot append the same optimizer to a second program
        engine._optimizer = _fresh_optimizer(engine)
    engine._executor = engine._job_plan = None
    with _evaluating(engine) if mode != "train" else nullcontext():
        result = prepare()
    if mode != "train":
        _initialize(engine, mode)
    prepared = _prepared(engine, mode)
    programs = vars(engine).setdefault(_PROGRAMS, {})
    programs.setdefault((mode, getattr(engine, REPLICATED, False), prepared.shapes), prepared)
    activate(engine, prepared)
    return result


@contextmanager
def _evaluating(engine: Any) -> Iterator[None]:
    """Layers behave as in evaluation (dropout, batch norm); Paddle changes the mode of a Layer around them only."""
    roots = [part for part in (engine._model, engine._loss) if isinstance(part, paddle.nn.Layer)]
    layers = [(layer, layer.training) for root in roots for layer in root.sublayers(include_self=True)]
    for layer, _ in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer, training in layers:
            layer.training = training


def _initialize(engine: Any, mode: str) -> None:
    """Parameters that no program has read before get their values, as Paddle does it for training."""
    dictionaries = (engine._pir_dist_main_progs, engine._pir_dense_main_progs, engine._startup_progs)
    before = [programs.get("train") for programs in dictionaries]
    for programs in dictionaries:
        programs["train"] = programs[mode]
    try:
        engine._initialize("train")
    finally:
        for programs, program in zip(dictionaries, before, strict=True):
            programs["train"] = program
            if program is None:
                del programs["train"]


def _prepared(engine: Any, mode: str) -> Prepared:
    forward = engine._fwd_main_progs[mode]
    names = list(engine._loss_names) if mode != "predict" else []
    layouts = {
        op.attrs()["output_name"]: Layout.of(op.operand_source(0))
        for op in forward.global_block().ops
        if op.name() == "builtin.shadow_output"
    }
    outputs = sorted((name for name in layouts if name.startswith(_OUTPUT)), key=lambda name: int(name.rpartition("_")[2]))
    return Prepared(
        mode=mode,
        main=engine._pir_dense_main_progs[mode],
        distributed=engine._pir_dist_main_progs[mode],
        startup=engine._pir_dist_startup_progs[mode],
        forward=forward,
        jobs=engine._job_plan,
        executor=engine._executor,
        optimizer=engine._optimizer if mode == "train" else None,
        inputs_spec=list(engine._inputs_spec),
        labels_spec=list(engine._labels_spec),
        loss_names=names,
        loss=layouts.get(names[0]) if names else None,
        outputs={name: layouts[name] for name in outputs},
    )


def fetches(prepared: Prepared, names: list[str]) -> dict[str, Any]:
    """The values of these outputs, as far as this rank makes them, in the program that runs."""
    program = prepared.main
    if prepared.jobs is not None:  # of the jobs of a micro batch, the last forward one makes the loss
        types = [t for t in prepared.jobs.job_types() if t.startswith("forward")]
        program = prepared.jobs.ir_program(max(types, key=lambda t: int(t.removeprefix("forward") or 0)))
    made = {
        op.attrs()["output_name"]: op.operand_source(0)
        for op in program.global_block().ops
        if op.name() == "builtin.shadow_output"
    }
    return {name: made[name] for name in names if name in made and made[name].initialized()}


def inner(optimizer: Any) -> Any:
    """The optimizer that mixed precision wraps, which has states and a learning rate."""
    return getattr(optimizer, "_optimizer", optimizer)


def _fresh_optimizer(engine: Any) -> Any:
    """An optimizer with the settings and the schedule of the engine's, without states."""
    optimizer = copy.copy(engine._orig_optimizer)
    for name, value in vars(engine._orig_optimizer).items():
        if name not in ("_learning_rate", "_grad_clip"):
            setattr(optimizer, name, copy.deepcopy(value))
    optimizer._learning_rate = inner(engine._optimizer)._learning_rate
    return optimizer


def _carry_states(source: Any, target: Any) -> None:
    """Copies optimizer states between programs of training, which name them differently."""
    scope, place = paddle.static.global_scope(), paddle.framework._current_expected_place_()
    for old, new in zip(states(source).values(), states(target).values(), strict=True):
        value = np.array(scope.find_var(old.name).get_tensor())
        if old.name != new.name:
            scope.var(new.name).get_tensor().set(value, place)


def states(optimizer: Any) -> dict[tuple[str, str], Any]:
    """The states of an optimizer by kind and name of the parameter; its master weight is of the kind ``master``."""
    optimizer = inner(optimizer)
    masters = dict(optimizer._master_weights)
    owners = {master.name: name for name, master in masters.items()}
    found = {("master", name): master for name, master in masters.items()}
    for kind, named in optimizer._accumulators.items():
        found |= {(kind, owners.get(name, name)): value for name, value in named.items()}
    return found


_OUTPUT = "rule_based_output_"


@paddle.jit.not_to_static
def _mark_loss(proxy: Any, mode: str) -> None:
    """Replaces ``append_loss_to_shadow_output``: outputs stay, too, where metrics read them."""
    name = paddle.utils.unique_name.generate("loss")
    paddle._C_ops.set_persistable_value(proxy._loss_vars[mode], name)
    proxy._loss_names[mode] = name
    if proxy.metrics:
        _mark_outputs(proxy, mode)


@paddle.jit.not_to_static
def _mark_outputs(proxy: Any, mode: str) -> None:
    for i, value in enumerate(v for v in paddle.utils.flatten(proxy._output_vars[mode]) if isinstance(v, paddle.pir.Value)):
        paddle._C_ops.set_persistable_value(value, f"{_OUTPUT}{i}")


def _metrics_of_legacy_programs(original: Any) -> Any:
    """Metrics of PIR programs are computed of whole outputs, see ``engine.life``."""

    @paddle.jit.not_to_static
    def call_metrics(proxy: Any, inputs: Any) -> list[Any]:
        found: list[Any] = [] if paddle.framework.in_pir_mode() else original(proxy, inputs)
        return found

    return call_metrics


def _predict(self, inputs, labels):
    """Replaces ``ProxyLayer._predict``, which keeps no output."""
    mode = "predict"
    self._input_vars[mode] = inputs
    self._label_vars[mode] = labels
    self._output_vars[mode] = self.inner_layer(*inputs)
    _mark_outputs(self, mode)
