"""Trains one case in this process: alone, or as one rank of a job under the tuner through one of its entry points.

What comes back are the losses of the steps, and this rank's part of every weight and optimizer state with its dims mapping on
the mesh (``compare`` puts the parts together).

The adaptive optimizers get an epsilon of 1e-3: with the default of 1e-8 an update does not depend on the size of a gradient, so
that one which is zero but for rounding, as that of the bias of keys is, moves a weight by a whole learning rate in either
direction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet import auto

import paddle_rbt_plugin as rbt
from random_models.grammar import Case
from random_models.model import WithLoss, batch_arrays, build, specs

RATES = {
    "SGD": 0.1, "Momentum": 0.05, "AdamW": 0.02, "Adam": 0.02, "Adagrad": 0.05, "RMSProp": 0.01, "Adamax": 0.02, "NAdam": 0.02,
    "RAdam": 0.02, "Adadelta": 0.5, "Lamb": 0.02,
}  # fmt: skip
EPSILON = 1e-3


@dataclass
class Part:
    """What one rank holds of a tensor: ``dims`` maps its dimensions to axes of the mesh, -1 for none."""

    array: np.ndarray
    dims: list[int]


@dataclass
class Trained:
    """The result of one rank. Keys of ``parts`` are ``weight NAME`` and ``state NAME ACCUMULATOR``."""

    losses: list[float] = field(default_factory=list)
    parts: dict[str, Part] = field(default_factory=dict)
    initial: dict[str, np.ndarray] = field(default_factory=dict)
    """The weights before training, of one process."""
    mesh: dict[str, Any] = field(default_factory=dict)
    """``shape`` and ``ranks`` of the mesh that the dims refer to."""


def train(case: Case, alone: bool, fault: int | None = None) -> Trained:
    """Trains a case. Raises whatever the tuner and Paddle raise. ``fault`` is a rank that gets a gradient wrong in dygraph, for
    the tests of this benchmark."""
    paddle.disable_static()
    paddle.seed(case["seed"] % 1000)
    with paddle.utils.unique_name.guard(), paddle.static.scope_guard(paddle.static.Scope()):
        try:
            model, criterion = build(case)
            model.train()
            if alone:
                initial = {f"weight {name}": np.array(p.numpy()) for name, p in model.named_parameters()}
                result = _in_dygraph(case, model, criterion, None)
                result.initial = initial
                return result
            if case["entry"] == "dygraph":
                return _in_dygraph(case, model, criterion, _dygraph_plan(case, model, criterion), fault)
            entry = {"to_static": _to_static, "engine": _engine}[case["entry"]]
            return entry(case, model, criterion)
        finally:
            paddle.disable_static()


def search_space(case: Case) -> dict[str, Any]:
    script = case["script"]
    space = {**case["layout"], "pp": 1, "sharding_stage": script["zero"], "recompute": script["recompute"]}
    return {k: v for k, v in space.items() if v is not None}


def _optimizer(case: Case, model: nn.Layer) -> tuple[Any, Any]:
    """The optimizer, and the schedule of its learning rate or None."""
    script = case["script"]
    name = script["optimizer"]
    rate: Any = RATES[name]
    lr = paddle.optimizer.lr
    schedule = {
        "none": lambda: None,
        "step": lambda: lr.StepDecay(rate, step_size=1, gamma=0.5),
        "warmup": lambda: lr.LinearWarmup(rate, warmup_steps=2, start_lr=0.25 * rate, end_lr=rate),
        "cosine": lambda: lr.CosineAnnealingDecay(rate, T_max=6),
    }[script["schedule"]]()
    clip = {
        "none": lambda: None,
        "global_norm": lambda: nn.ClipGradByGlobalNorm(0.5),
        "norm": lambda: nn.ClipGradByNorm(0.3),
        "value": lambda: nn.ClipGradByValue(0.05),
    }[script["clip"]]()
    more: dict[str, Any] = {"epsilon": EPSILON} if name not in ("SGD", "Momentum", "Rprop", "Lamb") else {}
    decay = "lamb_weight_decay" if name == "Lamb" else "weight_decay"
    more |= {decay: script["decay"]} if script["decay"] or name == "AdamW" else {}
    if name == "AdamW" and script["decay_of"] == "matrices":
        more["apply_decay_param_fun"] = lambda parameter: ".w_" in parameter and "norm" not in parameter
    made = getattr(paddle.optimizer, name)(schedule or rate, parameters=model.parameters(), grad_clip=clip, **more)
    return made, schedule


def micro_batches(case: Case, step: int) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
    """The micro batches of a step, as an engine under ``dp`` cuts them: each replica cuts its own run of the samples."""
    inputs, labels = batch_arrays(case, step)
    count, replicas = case["script"]["accumulate"], case["layout"]["dp"]
    rows = np.arange(case["sizes"]["batch"]).reshape(replicas, count, -1)
    for micro in range(count):
        chosen = rows[:, micro].flatten()
        yield [a[chosen] for a in inputs], [a[chosen] for a in labels]


def _in_dygraph(case: Case, model: Any, criterion: Any, plan: Any, fault: int | None = None) -> Trained:
    """Trains step by step, under a plan or alone."""
    result = Trained()
    optimizer, schedule = _optimizer(case, model)
    if plan is not None and case["script"]["zero"] and hasattr(plan, "shard_optimizer"):
        optimizer = plan.shard_optimizer(optimizer)
    count = case["script"]["accumulate"]
    for step in range(case["script"]["steps"]):
        batches: Any = [[*inputs, *labels] for inputs, labels in micro_batches(case, step)]
        taken = len(batch_arrays(case, step)[0])
        batches = plan.shard_dataloader(batches) if plan is not None else [[paddle.to_tensor(a) for a in b] for b in batches]
        losses = []
        for batch in batches:
            outputs = model(*batch[:taken])
            loss = criterion(*(outputs if isinstance(outputs, tuple) else (outputs,)), *batch[taken:])
            (loss / count if count > 1 else loss).backward()
            whole = dist.unshard_dtensor(loss) if loss.is_dist() else loss
            losses.append(float(whole.numpy().mean()))
        if fault == dist.get_rank() and plan is not None:
            model.parameters()[0].grad._local_value().scale_(1.05)
        optimizer.step()
        optimizer.clear_grad()
        if schedule is not None:
            schedule.step()
        result.losses.append(float(np.mean(losses)))
    names = {p.name: name for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        result.parts[f"weight {name}"] = _part(parameter, result)
    inner = getattr(optimizer, "_inner_opt", optimizer)
    for kind, by_name in inner._accumulators.items():
        for name, state in by_name.items():
            result.parts[f"state {names.get(name, name)} {_kind(kind)}"] = _part(state, result)
    return result


def _part(tensor: Any, result: Trained) -> Part:
    if not tensor.is_dist():
        return Part(np.array(tensor.numpy()), [-1] * tensor.ndim)
    mesh = tensor.process_mesh
    result.mesh = {"shape": list(mesh.shape), "ranks": list(mesh.process_ids)}
    dims = [-1] * tensor.ndim
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            tensor = dist.reshard(tensor, mesh, [dist.Replicate()] * len(mesh.shape))
            dims = [-1] * tensor.ndim
            break
        if placement.is_shard():
            dims[placement.get_dim()] = axis
    return Part(np.array(tensor._local_value().numpy()), dims)


def _dygraph_plan(case: Case, model: Any, criterion: Any) -> Any:
    """The plan under which the parameters of the model now lie."""
    inputs, labels = batch_arrays(case, 0)
    batch = case["sizes"]["batch"] // case["script"]["accumulate"]
    planned: Any = model
    if case["returned"]:
        planned = WithLoss(model, criterion, len(inputs))
        every = [*specs(inputs, "input", batch), *specs(labels, "label", batch)]
        plan = rbt.tune(planned, input_spec=every, search_space=search_space(case))
    else:
        plan = rbt.tune(
            model,
            input_spec=specs(inputs, "input", batch),
            labels_spec=specs(labels, "label", batch),
            loss=criterion,
            search_space=search_space(case),
        )
    plan.shard_layer(planned)
    return plan


def _strategy(case: Case) -> dict[str, Any]:
    script = case["script"]
    config: dict[str, Any] = {
        "tuning": {"enable": True, "pass_name": "rule_based_tuner", "search_space": search_space(case)},
        "sharding": {"enable": bool(script["zero"]), "stage": script["zero"] or 1},
    }
    if script["accumulate"] > 1:
        config["gradient_merge"] = {"enable": True, "k_steps": script["accumulate"], "avg": True}
    if script["recompute"] != "none" and case["entry"] == "engine":
        config["recompute"] = {"enable": True}
    return config


def _to_static(case: Case, model: Any, criterion: Any) -> Trained:
    result = Trained()
    inputs, labels = batch_arrays(case, 0)
    batch = case["sizes"]["batch"]
    spec = [specs(inputs, "input", batch), specs(labels, "label", batch)]
    trained, loss = model, criterion
    if case["returned"]:
        trained, loss, spec = WithLoss(model, criterion, len(inputs)), None, [[*spec[0], *spec[1]], []]
    names = {p.name: name for name, p in model.named_parameters()}
    optimizer, schedule = _optimizer(case, trained)
    static = dist.to_static(trained, None, loss, optimizer, dist.Strategy(_strategy(case)), input_spec=spec)
    static.train()
    plan = rbt.engine_plan(static)
    steps = range(case["script"]["steps"])
    for arrays in plan.shard_dataloader([[*inputs, *labels] for inputs, labels in (batch_arrays(case, i) for i in steps)]):
        result.losses.append(float(np.mean(np.array(static(*arrays)))))
        if schedule is not None:
            schedule.step()
    _collect(result, static._engine, names)
    return result


class _Samples(paddle.io.Dataset):
    def __init__(self, case: Case):
        self.batch, self.together = case["sizes"]["batch"], case["returned"]
        self.steps = [batch_arrays(case, step) for step in range(case["script"]["steps"])]

    def __len__(self) -> int:
        return self.batch * len(self.steps)

    def __getitem__(self, i: int) -> Any:
        inputs, labels = (tuple(a[i % self.batch] for a in arrays) for arrays in self.steps[i // self.batch])
        return (*inputs, *labels) if self.together else (inputs, labels)


class _Losses(paddle.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.losses.append(float(np.mean(logs["loss"])))


def _engine(case: Case, model: Any, criterion: Any) -> Trained:
    result, recorded = Trained(), _Losses()
    inputs, labels = batch_arrays(case, 0)
    trained, loss, more = model, criterion, {}
    if case["returned"]:
        trained, loss, more = WithLoss(model, criterion, len(inputs)), None, {"train_sample_split": len(inputs) + len(labels)}
    names = {p.name: name for name, p in model.named_parameters()}
    optimizer, _ = _optimizer(case, trained)
    engine = auto.Engine(trained, loss, optimizer, strategy=auto.Strategy(_strategy(case)))
    engine.fit(_Samples(case), batch_size=case["sizes"]["batch"], epochs=1, verbose=0, callbacks=[recorded], **more)
    result.losses = recorded.losses
    _collect(result, engine, names)
    return result


def _collect(result: Trained, engine: Any, names: dict[str, str]) -> None:
    """This rank's parts of the weights and states of a static program."""
    scope = paddle.static.global_scope()
    for op in engine._pir_dist_main_progs["train"].global_block().ops:
        if op.name() != "builtin.parameter":
            continue
        name = op.attrs()["parameter_name"]
        attr = op.result(0).dist_attr()
        variable = scope.find_var(name)
        if variable is None or attr is None:
            continue
        mesh = attr.process_mesh
        result.mesh = {"shape": list(mesh.shape), "ranks": list(mesh.process_ids)}
        key = f"weight {names[name]}" if name in names else _state_key(name, names)
        if key is not None:
            result.parts[key] = Part(np.array(variable.get_tensor()), list(attr.dims_mapping))


def _state_key(name: str, names: dict[str, str]) -> str | None:
    """``linear_0.w_0_moment1_0`` is a state of ``linear_0.w_0``."""
    owners = [n for n in names if name.startswith(f"{n}_")]
    if not owners:
        return None
    owner = max(owners, key=len)
    return f"state {names[owner]} {_kind(name[len(owner) + 1 :])}"


def _kind(accumulator: str) -> str:
    return accumulator.rstrip("0123456789").rstrip("_")
