"""Random numbers and initial weights of legacy programs: alike where a tensor is replicated, different for every shard.

Paddle's partitioner gives dropout and flash attention a stream that their placement decides, once its random control is on. It
is on while an engine with the tuner partitions, and the names of the streams are made here: Paddle's own seeds are sums of
multiples of the coordinates, of which several may be equal, and its streams are shared by all ops. Other random ops draw from
the generator of the device. All of them that a rank runs must be sharded along the same axes, which choose the seed of that
generator; it is set before each run, as the streams are (``random_streams``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel import random as paddle_random

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.graph.random_ops import DEVICE_OPS, SEED_OPERANDS, draws
from paddle_rbt_plugin.handover.shared.random_streams import PREFIX, coordinates, device_generator, hashed, seeded
from paddle_rbt_plugin.patching import Attribute, Setting, paddle_change

_OPERATORS = ("dist_dropout", "dist_flash_attn", "dist_fused_dropout_add")
"""Modules of Paddle that ask for a stream."""
_CANONICAL = {"gaussian_random": "gaussian", "uniform_random": "uniform"}
"""Random ops that have another name in PIR."""


@contextmanager
def controlled(rank: int) -> Iterator[list[str]]:
    """Lets Paddle's partitioner give random ops streams of their own; yields their names, to which it adds."""
    names: list[str] = []

    def name_stream(_: int, dims_mapping: Any = None, process_mesh: Any = None, placements: Any = None) -> str:
        mesh = mesh_of(process_mesh)
        shard = coordinates(Placement(tuple(dims_mapping)), mesh, rank)
        stage = "-".join(map(str, sorted(mesh.ranks)))
        names.append(f"{PREFIX}/legacy/{stage}/{len(names)}/{shard}")
        return names[-1]

    modules: list[Any] = [
        importlib.import_module(f"paddle.distributed.auto_parallel.static.operators.{name}") for name in _OPERATORS
    ]
    with streams_named.apply(modules, name_stream):
        yield names


@paddle_change(">=2.6,<3.4")
def streams_named(modules: Iterable[Any], name_stream: Callable[..., str]) -> Iterator[Setting]:
    """Switches Paddle's control of random streams on, and lets ``name_stream`` name them.

    Reason: it is off by default. Paddle's own seeds are sums of multiples of the coordinates, of which several may be equal,
    and its streams are shared by all ops.
    """
    for module in modules:
        yield Attribute(module, "determinate_rng", name_stream)
    yield Attribute(paddle_random, "_enable_random_control", True)


def mesh_of(mesh: Any) -> ProcessMesh:
    """A mesh of Paddle's as one of a plan."""
    return ProcessMesh(tuple(mesh.dim_names), tuple(mesh.shape), tuple(mesh.process_ids))


def draw_local_shapes(program: Any) -> None:
    """Lets the random ops of a rank's program draw as much as the rank holds: Paddle's partitioner leaves them the shape of the
    whole tensor."""
    block = program.global_block()
    for op in block.ops:
        if _CANONICAL.get(op.type, op.type) in DEVICE_OPS and op.has_attr("shape") and not op.input_arg_names:
            shape = list(block.vars[op.output_arg_names[0]].shape)
            if len(shape) == len(op.attr("shape")):
                op._set_attr("shape", shape)


def device_shard(context: Any, rank: int) -> str | None:
    """Which shard the ops that draw from the generator of the device make on a rank; None where there are none. A seed that the
    program fixes becomes that of the shard.

    Raises UnsupportedProgram where they are sharded in different ways."""
    shards: dict[str, str] = {}
    for op in context.dist_main_programs[rank].global_block().ops:
        type_ = _CANONICAL.get(op.type, op.type)
        if type_ in SEED_OPERANDS and op.input("Seed"):
            continue
        attr = context.get_op_dist_attr_for_program(op)
        if attr is None or type_ not in {*DEVICE_OPS, *SEED_OPERANDS} or not draws(type_, op.all_attrs()):
            continue
        mapping = attr.get_output_dims_mapping(op.output_arg_names[0])
        shard = coordinates(Placement(tuple(mapping)), mesh_of(attr.process_mesh), rank)
        if op.has_attr("fix_seed") and op.attr("fix_seed"):  # Paddle leaves it alone: all shards would drop the same values
            op._set_attr("seed", hashed(op.attr("seed"), shard) if shard else op.attr("seed"))
        else:
            shards.setdefault(shard, op.type)
    if len(shards) > 1:
        (_, first), (_, second) = list(shards.items())[:2]
        raise UnsupportedProgram(
            f"{first} and {second} share a random generator, but their results are sharded differently, so a legacy program "
            "cannot draw correct numbers for both; train in PIR or dygraph, or plan along one axis"
        )
    return next(iter(shards), None)


@contextmanager
def initial_draws(seed: int, rank: int) -> Iterator[None]:
    """Lets each rank draw initial weights of its own, from which those of replicas are shared afterwards."""
    with seeded(device_generator(), hashed(seed, "startup", rank)):
        yield


def share_in_scope(context: Any, place: Any) -> None:
    """Gives all ranks that hold one shard of a parameter the values that the first of them has drawn."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return
    scope, own_rank = paddle.static.global_scope(), dist.get_rank()
    for parameter in context.serial_main_program.all_parameters():
        attr = context.get_tensor_dist_attr_for_program(parameter)
        mesh, placement = mesh_of(attr.process_mesh), Placement(tuple(attr.dims_mapping))
        first: dict[str, int] = {}
        for rank in mesh.ranks:
            first.setdefault(coordinates(placement, mesh, rank), rank)
        own = coordinates(placement, mesh, own_rank) if own_rank in mesh.ranks else None
        shape = placement.local_shape(tuple(parameter.shape), mesh)
        for shard, source in first.items():
            variable = scope.find_var(parameter.name) if shard == own else None
            with paddle.base.dygraph.guard(), paddle.no_grad():
                if variable is None:  # it takes part, as all ranks do
                    value = paddle.zeros(shape, parameter.dtype)
                else:
                    value = paddle.to_tensor(np.array(variable.get_tensor()))
                dist.broadcast(value, src=source)
            if variable is not None and source != own_rank:
                variable.get_tensor().set(value.numpy(), place)
