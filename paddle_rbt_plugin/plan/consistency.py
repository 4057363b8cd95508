"""Checks that the parts of a plan fit together: degrees, batch, schedule, stages and tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from math import prod
from typing import Any, Protocol

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.spelling import counted


class Stated(Protocol):
    """The fields of ``Plan`` that must fit together; a plan is checked when it is read."""

    @property
    def degrees(self) -> Mapping[str, int]: ...
    @property
    def level(self) -> str: ...
    @property
    def global_batch(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def accumulate_steps(self) -> int: ...
    @property
    def sharding_degree(self) -> int | str: ...
    @property
    def schedule(self) -> str: ...
    @property
    def vpp(self) -> int: ...
    @property
    def ep(self) -> int: ...
    @property
    def stages(self) -> Sequence[Any]: ...
    @property
    def tensors(self) -> Mapping[str, Any]: ...


def contradictions(plan: Stated, cluster: Cluster) -> Iterator[str]:
    """Every contradiction, those of single fields first; ``cluster`` is the cluster of the plan."""
    yield from _settings(plan)
    for i, stage in enumerate(plan.stages):
        size = prod(stage.mesh)
        if stage.layers[0] > stage.layers[1]:
            yield f"stages/{i}: its layers {list(stage.layers)} end before they begin"
        if size != len(stage.devices) or len(stage.mesh) != len(stage.axes) or len(set(stage.devices)) != size:
            yield (
                f"stages/{i}: mesh {list(stage.mesh)} with axes {list(stage.axes)} does not arrange "
                f"{len(stage.devices)} different devices"
            )
    used = max(d for stage in plan.stages for d in stage.devices) + 1
    if prod(plan.degrees.values()) != cluster.device_count or used > cluster.device_count:
        devices = counted(cluster.device_count, "device")
        yield f"degrees {plan.degrees} and devices up to {used - 1} do not use the {devices} of its cluster exactly"
    yield from _pipeline(plan)
    yield from _tensors(plan)


def _settings(plan: Stated) -> Iterator[str]:
    dp = plan.degrees["dp"]
    if plan.ep not in (1, dp):
        yield f"ep {plan.ep} is neither 1 nor degrees/dp {dp}"
    if isinstance(plan.sharding_degree, int) and dp % plan.sharding_degree:
        yield f"sharding_degree {plan.sharding_degree} does not divide degrees/dp {dp}"
    if plan.micro_batch * plan.accumulate_steps * dp != plan.global_batch:
        yield (
            f"micro_batch {plan.micro_batch} x accumulate_steps {plan.accumulate_steps} x degrees/dp {dp} is not "
            f"global_batch {plan.global_batch}"
        )
    if (plan.schedule == "VPP") != (plan.vpp > 1):
        yield f"schedule {plan.schedule!r} with vpp {plan.vpp}: VPP interleaves several chunks per stage, the others run one"


def _pipeline(plan: Stated) -> Iterator[str]:
    """Entries hold the layers in order; chunk ``j`` of the model runs on pipeline stage ``j % pp``, each on its own devices."""
    if plan.stages[0].layers[0] != 0:
        yield f"stages/0: its layers begin with {plan.stages[0].layers[0]}, not with 0"
    for i, (before, after) in enumerate(pairwise(plan.stages), 1):
        if after.layers[0] != before.layers[1] + 1:
            yield f"stages/{i}: its layers begin with {after.layers[0]}, but stages/{i - 1} end with {before.layers[1]}"
    pp = plan.degrees["pp"]
    chunks = [devices for devices, _ in groupby(frozenset(stage.devices) for stage in plan.stages)]
    if len(chunks) != pp * plan.vpp:
        yield f"stages: they run {len(chunks)} chunks of the model one after the other, not degrees/pp {pp} x vpp {plan.vpp}"
    elif any(devices != chunks[j % pp] for j, devices in enumerate(chunks)):
        yield f"stages: the {plan.vpp} chunks of a pipeline stage do not run on the same devices"
    elif len(frozenset().union(*chunks[:pp])) < sum(map(len, chunks[:pp])):
        yield f"stages: the {pp} pipeline stages of degrees/pp share devices"
    size = prod(n for axis, n in plan.degrees.items() if axis != "pp")
    for i, stage in enumerate(plan.stages):
        if len(stage.devices) != size:
            yield f"stages/{i}: it has {len(stage.devices)} devices; degrees {plan.degrees} give a stage {size}"
        if plan.level == "o1" and any(plan.degrees.get(axis, 1) != n for axis, n in zip(stage.axes, stage.mesh, strict=True)):
            yield f"stages/{i}: mesh {list(stage.mesh)} with axes {list(stage.axes)} is not degrees {plan.degrees}"


def _tensors(plan: Stated) -> Iterator[str]:
    for name, t in plan.tensors.items():
        axes = [a for a in t.dims_mapping if a >= 0]
        if (
            (t.shape is not None and len(t.shape) != len(t.dims_mapping))
            or t.stage >= len(plan.stages)
            or len(set(axes)) < len(axes)
            or any(a >= len(plan.stages[t.stage].mesh) for a in axes)
        ):
            yield f"tensors/{name}: dims_mapping {list(t.dims_mapping)} does not fit stage {t.stage}"
