"""The plan: the tuner's decision as plain data that can be saved, loaded and explained.

A plan refers to tensors by name, never by position in a program, and contains the signature of its program and the description
of its cluster. Loading a plan only reads JSON.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.errors import HandoverError, PlanError, TunerWarning
from paddle_rbt_plugin.file_schema import no_constant, problem, unprintable
from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.plan.consistency import contradictions
from paddle_rbt_plugin.plan.files import write_whole

SCHEMA = 2


@dataclass(frozen=True)
class Stage:
    """Layers (first and last) with one strategy on one pipeline stage: its devices, and how they are arranged for these layers.

    A pipeline stage has several entries if it runs several model chunks, or if its layers differ (level o2)."""

    layers: tuple[int, int]
    devices: tuple[int, ...]
    mesh: tuple[int, ...]
    axes: tuple[str, ...]
    recompute: str | None = None
    """Recomputation of these layers, if it differs from the plan's."""

    @property
    def process_mesh(self) -> ProcessMesh:
        """The devices of the stage as its axes arrange them."""
        return ProcessMesh(self.axes, self.mesh, self.devices)


@dataclass(frozen=True)
class TensorPlacement:
    """The placement of one tensor, and the pattern that decided it (None if none did)."""

    stage: int
    dims_mapping: tuple[int, ...]
    """Mesh axis per dimension, -1 for none."""
    pattern: str | None = None
    distribution: str | None = None
    kind: str = "param"
    structured_name: str = ""
    shape: tuple[int, ...] | None = None
    """Of the whole tensor; None in plans that were saved without it."""
    frozen: bool = False
    """A parameter that is not trained."""
    mesh: ProcessMesh | None = None
    """The mesh of the stage; filled in by ``Plan.placements``."""

    @property
    def placement(self) -> Placement:
        """The dims mapping as a placement; tensors that a plan places are never partial."""
        return Placement(self.dims_mapping)


@dataclass(frozen=True)
class PlanEstimate:
    """Predicted cost: seconds per step, bytes on the fullest device, and their breakdowns."""

    step_time_s: float
    peak_memory_bytes: int
    time: Mapping[str, float]
    """Seconds."""
    memory: Mapping[str, float]
    """Bytes."""
    tflops_per_gpu: float = 0.0

    def __getitem__(self, key: str) -> Any:
        """The same by key, as in the JSON."""
        return asdict(self)[key]


@dataclass(frozen=True)
class Plan:
    """A parallel strategy for one program on one cluster. ``explain()`` gives the reasons for it."""

    signature: str
    degrees: dict[str, int]
    level: str
    global_batch: int
    micro_batch: int
    accumulate_steps: int
    recompute: str
    sharding_stage: int
    sequence_parallel: bool
    schedule: str
    vpp: int
    precision: str
    stages: tuple[Stage, ...]
    tensors: Mapping[str, TensorPlacement]
    """Parameters, data, and intermediate tensors that a pattern claims, by name, in the order of the program."""
    estimate: PlanEstimate
    candidates: tuple[Mapping[str, Any], ...]
    """The candidates that can run, best first, with ``step_time_s`` and ``peak_memory_bytes``."""
    rejected: tuple[Mapping[str, Any], ...]
    """The rejections: ``candidate``, the ``kind`` of the reason, its ``figures``, the ``reason`` in words, and ``count``, the
    number of rejected candidates (absent if a way to use the devices is ruled out as a whole)."""
    patterns: Mapping[str, Mapping[str, Any]]
    """Per pattern that matched: ``distribution``, ``version``, ``matches``."""
    unmatched: tuple[Mapping[str, Any], ...]
    """Weights that no pattern claims: ``name``, ``shape``, the ``readers`` (ops), ``kind`` and the ``reason`` in words."""
    cluster: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    """What the user should know, such as settings that are recommended but not applied (see ``paddle_rbt_plugin.notes``)."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """The model that the command line planned (``reference``, ``seq``), so that it can be built again; empty for other
    plans."""
    cost_model: Mapping[str, str] = field(default_factory=dict)
    """The cost model that predicted ``estimate`` and ranked the candidates: ``name``, ``distribution``, ``version``; empty in
    older plans."""
    sharding_degree: int | str = "whole"
    """Replicas over which ZeRO splits states: the ``whole`` data-parallel group, or a number of neighbours that divides it."""
    schema: int = field(default=SCHEMA)
    assumed: bool = False
    """Whether the plan is for values that were assumed, of a model that computes shapes or branches from values: no program is
    handed over with it."""
    ep: int = 1
    """Ranks over which the experts of a mixture are divided: 1, or all of dp; not a factor of the devices besides dp."""

    def placements(self, name: str) -> TensorPlacement:
        """The placement of a tensor, given its name or its path in ``named_parameters()``. Raises PlanError for an unknown
        name."""
        found = self.tensors.get(name) or self._by_structured_name.get(name)
        if found is None:
            raise PlanError(
                f"the plan places no tensor {name!r}; it knows {len(self.tensors)}, such as {next(iter(self.tensors))!r}"
            )
        return replace(found, mesh=self.stages[found.stage].process_mesh)

    @property
    def _by_structured_name(self) -> dict[str, TensorPlacement]:
        return {t.structured_name: t for t in self.tensors.values() if t.structured_name}

    # The program and the cluster of the plan

    def check_program(self, graph: Graph) -> None:
        """Raises PlanError unless the plan was made for a program like this one.

        Old plans have a signature that does not cover which parameters are trained and where gradients end. Their placements
        are right nevertheless, since they follow from the structure. Such a plan is accepted with a warning: its estimate, its
        recomputation and its division of states may be those of the program with other parameters frozen."""
        if graph.signature == self.signature:
            return
        if self.assumed and not graph.assumed:
            self.check_executable()
        if graph.structure_signature != self.signature:
            raise PlanError(f"the plan is for another program: {self._difference(graph)}")
        warnings.warn(
            "the plan has an old signature, which does not cover frozen parameters: it fits the structure of this program, "
            "but its estimate may assume that other parameters are trained; plan again and save the result",
            TunerWarning,
            stacklevel=3,
        )

    def check_executable(self) -> None:
        """Raises HandoverError for a plan that is for planning only."""
        if self.assumed:
            raise HandoverError(
                "the plan cannot be executed: it assumes a balanced load of experts that the model chooses by value "
                "(see its notes), and no static program or sharded Layer exchanges tokens as it was costed; write the experts "
                "with stacked weights [experts, in, out] and a fixed capacity, and plan again"
            )

    def for_program(self, graph: Graph) -> Plan:
        """The plan with the signature of a program that it was made for. Raises PlanError and warns like ``check_program``."""
        self.check_program(graph)
        return replace(self, signature=graph.signature)

    def check_cluster(self, cluster: Cluster) -> None:
        """Raises PlanError unless the plan was made for a cluster like this one."""
        planned = Cluster.from_dict(self.cluster)
        if planned.device_count != cluster.device_count or planned.short_form != cluster.short_form:
            raise PlanError(f"the plan is for the cluster {planned}, not for {cluster}; plan again for {cluster}")
        if planned != cluster:
            raise PlanError(
                f"the plan is for a cluster {planned} with other figures (memory, FLOP/s or bandwidths); plan again, or "
                "describe the cluster as it was described then"
            )

    def _difference(self, graph: Graph) -> str:
        for kind, found in (("param", graph.params), ("data", graph.data)):
            planned = [name for name, t in self.tensors.items() if t.kind == kind]
            word = "parameters" if kind == "param" else "inputs"
            if len(planned) != len(found):
                return f"it has {len(found)} {word}, the plan has {len(planned)}"
            if set(planned) == {t.name for t in found}:
                found = tuple(sorted(found, key=lambda t: planned.index(t.name)))
            for name, t in zip(planned, found, strict=True):
                frozen = self.tensors[name].frozen
                if kind == "param" and self.tensors[name].shape == t.shape and frozen != t.stop_gradient:
                    return (
                        f"it {'trains' if frozen else 'freezes'} {t.name}, which the plan {'freezes' if frozen else 'trains'}"
                    )
        return (
            f"shapes, operations or where gradients end differ (signature {graph.signature[:8]}, the plan has "
            f"{self.signature[:8]}); the batch and sequence sizes must be the same too"
        )

    def leaves(self, graph: Graph) -> dict[str, TensorPlacement]:
        """The placement of every parameter and data tensor of a program with this signature, by its name in that program.

        Paddle numbers parameters per process, so names may differ in the same model; then tensors correspond by order. Raises
        PlanError for another program."""
        self.check_program(graph)
        leaves = {}
        for kind, found in (("param", graph.params), ("data", graph.data)):
            planned = {name: t for name, t in self.tensors.items() if t.kind == kind}
            if set(planned) == {t.name for t in found}:
                placed = planned
            elif len(planned) == len(found):
                placed = dict(zip((t.name for t in found), planned.values(), strict=True))
            else:
                raise PlanError(f"the plan is for another program: {self._difference(graph)}")
            for t in found:
                if len(placed[t.name].dims_mapping) != t.ndim:
                    mapping = list(placed[t.name].dims_mapping)
                    raise PlanError(
                        f"the plan maps the {t.ndim} dimensions of {t.name!r} as {mapping}; one entry each would be right"
                    )
            leaves.update(placed)
        return leaves

    def stage_of_layers(self, count: int) -> list[int]:
        """The index in ``stages`` for each of a program's ``count`` layers. Raises PlanError if the stages run another number
        of layers."""
        planned = self.stages[-1].layers[1] + 1
        if planned != count:
            raise PlanError(f"the stages of the plan run {planned} layers, but the program has {count}; plan again")
        return [i for i, stage in enumerate(self.stages) for _ in range(stage.layers[0], stage.layers[1] + 1)]

    # Explanation and execution: declared here for readers and type checkers, implemented above (``api.bind_methods``)

    def explain(self, tensor: str | None = None) -> str:
        """Why this plan was chosen, why others were not, and what no pattern matched; with ``tensor``, the explanation of that
        tensor."""
        raise NotImplementedError

    def shard_layer(self, model: Any) -> Any:
        """Shards the parameters of a dygraph Layer according to the plan, in place; returns the Layer."""
        raise NotImplementedError

    def shard_optimizer(self, optimizer: Any) -> Any:
        """Divides the states (moments, master weights) of the optimizer of a Layer that ``shard_layer`` has sharded over the
        replicas, in place, according to the ZeRO stage of the plan; returns the optimizer."""
        raise NotImplementedError

    def shard_dataloader(self, loader: Any) -> Any:
        """Wraps a loader of whole batches so that each rank gets its part; also for ``dist.to_static`` and ``Engine.run``."""
        raise NotImplementedError

    def check_replicas(self, model: Any) -> None:
        """Checks that replicas of the tensors of a sharded Layer are equal on all ranks. Raises HandoverError that names the
        first tensor that differs, and the ranks. All ranks must call it."""
        raise NotImplementedError

    def to_strategy(self) -> Any:
        """A ``paddle.distributed.Strategy`` with the settings of the plan."""
        raise NotImplementedError

    # JSON

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        data = {k: v for k, v in vars(self).items() if k not in ("stages", "tensors", "estimate")}
        if not self.assumed:
            del data["assumed"]
        data["stages"] = [{k: v for k, v in asdict(s).items() if v is not None} for s in self.stages]
        data["tensors"] = {name: _tensor_dict(t) for name, t in self.tensors.items()}
        data["estimate"] = asdict(self.estimate)
        return {"schema": data.pop("schema"), **json.loads(json.dumps(data))}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; an existing file is replaced completely or not at all. Raises PlanError."""
        try:
            write_whole(path, json.dumps(self.to_dict(), indent=1))
        except OSError as error:
            raise PlanError(f"the plan cannot be saved to {str(path)!r}: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Loads a saved plan; executes nothing. Raises PlanError that says what is wrong with the file."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=no_constant)
        except RecursionError as error:
            raise PlanError(f"{str(path)!r} is not a plan: it is nested too deeply") from error
        except TypeError as error:
            raise PlanError(f"a plan is loaded from a path, not from {path!r}") from error
        except OSError as error:
            raise PlanError(f"the plan {str(path)!r} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise PlanError(f"{str(path)!r} is not a plan: it is not JSON ({error})") from error
        return cls.from_dict(data, str(path))

    @classmethod
    def from_dict(cls, data: Any, source: str = "plan") -> Plan:
        """The plan of a dict made by ``to_dict``. Raises PlanError, naming ``source`` and the field, for anything else."""
        if isinstance(data, dict) and isinstance(data.get("schema"), int) and data["schema"] not in range(1, SCHEMA + 1):
            raise PlanError(
                f"{source}: the plan has schema {data['schema']}, this version reads schemas 1 to {SCHEMA}; plan again"
            )
        if where := unprintable(data):
            raise PlanError(f"{source} is not a plan: {where} holds text that cannot be printed")
        if wrong := problem("paddle_rbt_plugin.plan", "schema.json", data):
            raise PlanError(f"{source} is not a plan: {wrong}")
        known = {k: v for k, v in _of_this_schema(data).items() if k in cls.__dataclass_fields__}
        stages = tuple(
            Stage(tuple(s["layers"]), tuple(s["devices"]), tuple(s["mesh"]), tuple(s["axes"]), s.get("recompute"))
            for s in data["stages"]
        )
        tensors = {name: _read_tensor(t) for name, t in data["tensors"].items()}
        known |= {"stages": stages, "tensors": tensors, "estimate": PlanEstimate(**data["estimate"])}
        for key in ("candidates", "rejected", "unmatched", "notes"):
            known[key] = tuple(known.get(key, ()))
        plan = cls(**known)
        for contradiction in contradictions(plan, Cluster.from_dict(plan.cluster, source)):
            raise PlanError(f"{source} is not a plan: {contradiction}")
        return plan


def _of_this_schema(data: dict[str, Any]) -> dict[str, Any]:
    """The content of a plan file in the current schema; entries that schema 1 has only in words get a generic kind."""
    if data["schema"] == SCHEMA:
        return data
    rejected = [{"kind": "other", "figures": {}} | entry for entry in data["rejected"]]
    unmatched = [{"name": line.partition(" [")[0], "kind": "no_pattern", "reason": line} for line in data["unmatched"]]
    return data | {"schema": SCHEMA, "rejected": rejected, "unmatched": unmatched}


def _tensor_dict(t: TensorPlacement) -> dict[str, Any]:
    return {
        "stage": t.stage,
        "dims_mapping": list(t.dims_mapping),
        "pattern": t.pattern,
        "distribution": t.distribution,
        "kind": t.kind,
        "structured_name": t.structured_name,
        **({} if t.shape is None else {"shape": list(t.shape)}),
        **({"frozen": True} if t.frozen else {}),
    }


def _read_tensor(t: Mapping[str, Any]) -> TensorPlacement:
    shape = tuple(t["shape"]) if "shape" in t else None
    mapping = tuple(t["dims_mapping"])
    names = t["pattern"], t["distribution"], t["kind"], t["structured_name"]
    return TensorPlacement(t["stage"], mapping, *names, shape, t.get("frozen", False))
