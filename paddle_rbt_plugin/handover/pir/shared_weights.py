"""Weights that several pipeline stages read, a head tied to the embedding above all: every such stage has a copy.

Once per step the gradients of the copies are summed on the first of these stages, where the optimizer clips and regularises
the sum like any other gradient, so that a global norm counts it once. What the update reads goes to the other stages, which
update their copies in the same way. All copies begin with the same values and so stay equal.

While Paddle makes a program, copies have names of their own, since an optimizer knows states by the names of parameters
(``name_copy``). In the program of a rank, which holds one of them, it has the parameter's own name again (``names_restored``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle

from paddle_rbt_plugin.completion.distributed_ops import placement_of, tensor_attr
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.handover.pir import parameter_attributes
from paddle_rbt_plugin.handover.pir.zero import state_placement
from paddle_rbt_plugin.patching import Attribute, Setting, paddle_change

_COPY = re.compile(r"@stage\d+")
_FUNCTIONS = ("_apply_decay_param_fun", "_lr_ratio", "_exclude_from_weight_decay_fn")
"""Attributes of optimizers that hold functions of a parameter, or of its name, which users give."""
_NAMES = ("parameter_name", "output_name", "name")
"""Attributes that hold the names of parameters and states."""


def name_copy(parameter: Any, stage: int) -> None:
    """Names an op that holds a parameter as its copy on a stage."""
    parameter.set_str_attr("parameter_name", f"{parameter.attrs()['parameter_name']}@stage{stage}")


def original_name(name: str) -> str:
    """The name of the parameter that a copy is of."""
    return _COPY.sub("", name)


def copies_in(program: Any) -> list[str]:
    """The names of the copies that a program holds."""
    names = (op.attrs()["parameter_name"] for op in program.global_block().ops if op.name() == "builtin.parameter")
    return [name for name in names if _COPY.search(name)]


@paddle_change(">=3.0,<3.4")
def names_restored() -> Iterator[Setting]:
    """Lets copies have the parameter's own name, and their states its states' names, in the programs of ranks.

    Reason: an optimizer knows states by the names of parameters, so copies need names of their own until Paddle has removed
    from a rank's program what is not of that rank, which happens inside the engine.
    """
    from paddle.distributed.auto_parallel.static.pir_pass import RemovePasses

    original = RemovePasses.apply_all

    def apply_all(main: Any, startup: Any, *gradients: Any) -> None:
        original(main, startup, *gradients)
        for program in (main, startup):
            _restore_names(program)

    yield Attribute(RemovePasses, "apply_all", staticmethod(apply_all))


def _restore_names(program: Any) -> None:
    for op in program.global_block().ops:
        for attribute in _NAMES:
            name = op.attrs().get(attribute)
            if isinstance(name, str) and _COPY.search(name):
                op.set_str_attr(attribute, _COPY.sub("", name))


@contextmanager
def updated(engine: Any, program: Any) -> Iterator[None]:
    """Lets an engine update the copies that its annotated program holds, while it makes the program of a rank."""
    names = engine._parameter_name_list
    engine._parameter_name_list = [*names, *copies_in(program)]
    with gradients_summed(engine._optimizer):
        try:
            yield
        finally:
            engine._parameter_name_list = names


@contextmanager
def gradients_summed(optimizer: Any) -> Iterator[None]:
    """Lets ``optimizer`` sum the gradients of copies and update them alike, while Paddle makes a program."""
    optimizer = getattr(optimizer, "_inner_opt", optimizer)  # that of dist.shard_optimizer
    if optimizer is None:
        yield
        return
    with copies_summed.apply(optimizer):
        yield


@paddle_change(">=3.0,<3.4")
def copies_summed(optimizer: Any) -> Iterator[Setting]:
    """Puts ``_Summing`` before the class of an optimizer.

    Reason: the engine calls methods of the optimizer that it was given, between the gradients and the update.
    """
    original = type(optimizer)
    yield Attribute(optimizer, "__class__", type(original.__name__, (_Summing, original), {"copies": {}}))


class _Summing:
    """Goes before the class of an optimizer. Paddle calls ``_apply_optimize``, or in mixed precision ``apply_gradients``, with
    the gradients of all parameters, and ``_pir_create_optimization_pass`` with what the update reads."""

    copies: dict[str, list[Any]]
    """The copies of a parameter, by its name."""

    def _apply_optimize(self, loss: Any, startup_program: Any, params_grads: list[Any], *args: Any, **kwargs: Any) -> Any:
        summed = self._summed(params_grads)
        return super()._apply_optimize(loss, startup_program, summed, *args, **kwargs)  # type: ignore[misc]

    def apply_gradients(self, params_grads: list[Any]) -> Any:
        return super().apply_gradients(self._summed(params_grads))  # type: ignore[misc]

    def _pir_create_optimization_pass(self, parameters_and_grads: list[Any], *args: Any, **kwargs: Any) -> Any:
        pairs = list(parameters_and_grads)
        for parameter, gradient in parameters_and_grads:
            for copy in self.copies.get(parameter.name, ()):
                pairs.append((copy, None if gradient is None else _sent(gradient, copy.process_mesh)))
        with self._asked_of_originals({p.name: p for p, _ in parameters_and_grads}):
            return super()._pir_create_optimization_pass(pairs, *args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _asked_of_originals(self, originals: dict[str, Any]) -> Iterator[None]:
        """Lets the functions that a user gives an optimizer, to tell parameters apart, see parameters for their copies."""

        def original(asked: Any) -> Any:
            name = _COPY.sub("", asked if isinstance(asked, str) else asked.name)
            return name if isinstance(asked, str) else originals.get(name, asked)

        own = {name: getattr(self, name) for name in _FUNCTIONS if getattr(self, name, None) is not None}
        for name, function in own.items():
            setattr(self, name, lambda asked, function=function: function(original(asked)))
        try:
            yield
        finally:
            for name, function in own.items():
                setattr(self, name, function)

    def _create_master_weight(self, parameter: Any) -> Any:
        """Copies the parameter where the startup program makes it: with that Paddle lets the master weight begin."""
        if _COPY.search(parameter.name):
            _begin_alike(parameter.name)
        return super()._create_master_weight(parameter)  # type: ignore[misc]

    def _summed(self, params_grads: list[Any]) -> list[Any]:
        """The gradients of parameters without those of copies, which are in their sums."""
        self.copies.clear()
        gradients: dict[str, list[Any]] = {}
        for parameter, gradient in params_grads:
            name = _COPY.sub("", parameter.name)
            if name != parameter.name:
                parameter_attributes.copy(next(p for p, _ in params_grads if p.name == name), parameter)
                self.copies.setdefault(name, []).append(parameter)
                gradients.setdefault(name, []).append(None if gradient is None else _finished(parameter, gradient))
        pairs = []
        for parameter, gradient in params_grads:
            if parameter.name in self.copies:
                total = None if gradient is None else _finished(parameter, gradient)
                for other in gradients[parameter.name]:
                    arrived = None if other is None else _sent(other, parameter.process_mesh)
                    total = arrived if total is None else total if arrived is None else paddle._C_ops.add(total, arrived)
                pairs.append((parameter, total))
            elif not _COPY.search(parameter.name):
                pairs.append((parameter, gradient))
        return pairs


def _finished(parameter: Any, gradient: Any) -> Any:
    """A gradient as the update reads it: summed over the replicas of its stage, or the part of a replica under ZeRO."""
    placement = placement_of(parameter)
    if placement_of(gradient) in (placement, state_placement(parameter)):
        return gradient
    return paddle._C_ops.reshard_v2(gradient, tensor_attr(parameter.process_mesh, placement))


def _sent(gradient: Any, mesh: Any) -> Any:
    """A gradient on another stage, where it lies alike."""
    placement = Placement(placement_of(gradient).dims_mapping)
    return paddle._C_ops.reshard_v2(gradient, tensor_attr(mesh, placement))


def _begin_alike(name: str) -> None:
    startup = paddle.static.default_startup_program()
    makers = {op.attrs()["parameter_name"]: op for op in startup.global_block().ops if op.name() == "builtin.set_parameter"}
    made = makers.get(_COPY.sub("", name))
    if made is not None and name not in makers:
        with paddle.static.program_guard(startup):
            paddle.pir.set_insertion_point_after(made)
            source = made.operand_source(0).get_defining_op()
            copy = source.clone(paddle.pir.IrMapping(), paddle.pir.CloneOptions(False, True, True))
            paddle._pir_ops.set_parameter(copy.result(0), name)
