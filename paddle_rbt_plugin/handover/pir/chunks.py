"""Interleaved pipelines: which model chunk each op belongs to, and which chunks exchange a value.

Chunk ``c`` of a model runs on stage ``c % pp``, as chunk ``c // pp`` of that stage: the ``chunk_id`` of Paddle's ops, by which
its interleaved schedule cuts the program of a rank into jobs. Annotation marks the forward ops; autodiff marks their gradients.

A value moves between two stages when its first reader needs it, or the first stage that it goes on to: it is received in the
reader's chunk, and sent by the chunk of the sending stage that runs last before that one. All ranks run the same chunks and
micro batches in the same order (backward, in the reverse order of chunks), so the messages of one phase between two ranks
arrive in the order of their sending.
Forward and backward messages do not: since chunks go round, both phases send both ways between the first stage and
the last, and how they alternate differs on the two. So each phase has communicators of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle.distributed.auto_parallel.static import process_group
from paddle.distributed.fleet.meta_optimizers.common import OpRole

_BACKWARD, _OPTIMIZE = int(OpRole.Backward), int(OpRole.Optimize)


def mark(op: Any, chunk: int) -> None:
    """Says that ``op`` belongs to that chunk of its stage."""
    attr = op.dist_attr
    if attr is None:
        op.set_int_attr("chunk_id", chunk)
    else:
        op.dist_attr = paddle.base.libpaddle.pir.create_op_dist_attribute(
            attr.process_mesh, attr.operands(), attr.results(), chunk
        )


def chunk_of(op: Any) -> int | None:
    """The chunk that an op is marked with, if it is."""
    if op.dist_attr is not None and op.dist_attr.chunk_id >= 0:
        return int(op.dist_attr.chunk_id)
    return int(op.chunk_id) if op.has_attr("chunk_id") else None


def settle(program: Any) -> None:
    """Settles the marks of a partitioned program before its reshards, which copy them, are resolved.

    Ops that read nothing on a mesh had none when they were marked, and have one now. Sums of gradients from one stage belong
    to the chunk that adds the last of them; autodiff marks that of a received value with the chunk that made it elsewhere."""
    for op in program.global_block().ops:
        if op.dist_attr is not None and op.has_attr("chunk_id"):
            mark(op, int(op.chunk_id))
        if op.name() == "pd_op.add_n" and op.operand_source(0).get_defining_op().name() == "builtin.combine":
            chunks = [_made_in(part) for part in op.operand_source(0).get_defining_op().operands_source()]
            if None not in chunks:
                mark(op, min(chunk for chunk in chunks if chunk is not None))


def complete(program: Any) -> None:
    """Marks what is left of the program of a rank: an op runs in the chunk that makes the last of what it reads, one that reads
    nothing in the first chunk that reads it, and what only the optimizer reads in chunk 0."""
    for op in program.global_block().ops:
        role = int(op.op_role)
        if role == _OPTIMIZE or chunk_of(op) is not None:
            continue
        first, last = _order(role)
        producers = [v.get_defining_op() for v in op.operands_source() if v.initialized()]
        made = [chunk_of(p) for p in producers if p is not None and int(p.op_role) == role]
        marked = [chunk for chunk in made if chunk is not None]
        mark(op, last(marked) if marked else first((c for r in op.results() for c in _readers(r, role)), default=0))


def exchange(_: Any, source: Any, target: Any, value: Any, target_type: Any) -> Any:
    """A ``ReshardFunction.reshard`` from one mesh to another: a send or a receive in the chunks that the module describes, on
    the communicator of its phase. Ranks that do neither keep a reshard, as in Paddle, which removes what is not of a rank.

    The ranks of the stages ascend, so the meshes tell which stage comes first."""
    pir = paddle.base.libpaddle.pir
    reshard = pir.get_current_insertion_point().get_operation()
    role = int(reshard.op_role)
    backward = role == _BACKWARD
    pairs = list(zip(source.process_mesh.process_ids, target.process_mesh.process_ids, strict=True))
    groups = {pair: _communicator(pair, backward) for pair in pairs}
    # What no chunk reads is for the optimizer: a gradient, received in the chunk that runs last, or a norm, which is in none.
    readers = _readers(reshard.result(0), role) if role != _OPTIMIZE else []
    received = _order(role)[0](readers, default=0)
    sent = _sent_in(received, role, source.process_mesh, target.process_mesh)
    rank = paddle.distributed.get_rank()
    for pair, group in groups.items():
        if rank == pair[0]:
            paddle._C_ops.send_v2(value, group.id, 1, True, False)
            point = pir.get_current_insertion_point()
            point.prev()
            point.get_operation().dist_attr = pir.create_op_dist_attribute(source.process_mesh, [source], [], sent)
        elif rank == pair[1]:
            got = paddle._C_ops.recv_v2(target_type._local_shape, target_type.dtype, 0, group.id, True, False)
            got.get_defining_op().dist_attr = pir.create_op_dist_attribute(target.process_mesh, [], [target], received)
            got.set_type(target_type)
            return got
    kept = paddle._C_ops.reshard_v2(value, target)
    kept.set_type(target_type)
    return kept


def _sent_in(received: int, role: int, source: Any, target: Any) -> int:
    """The chunk of the sending stage that runs last before the one that receives a value."""
    upwards = source.process_ids[0] < target.process_ids[0]
    return received + upwards if role == _BACKWARD else received - (not upwards)


def _order(role: int) -> tuple[Callable[..., int], Callable[..., int]]:
    """What tells which of several chunks of a stage runs first in a phase, and which last."""
    return (max, min) if role == _BACKWARD else (min, max)


def _made_in(value: Any) -> int | None:
    """The chunk that a value is made in, through reshards of its mesh; None where it comes from another stage."""
    op = value.get_defining_op()
    while op.name() == "dist_op.reshard":
        value = op.operand_source(0)
        if value.process_mesh != op.result(0).process_mesh:
            return None
        op = value.get_defining_op()
    return chunk_of(op)


def _readers(value: Any, role: int) -> list[int]:
    """The chunks of the ops of a phase that read a value, through lists and reshards, which have no chunk yet. One that is sent
    on is read in the chunk that sends it."""
    chunks: list[int] = []
    for op in value.all_used_ops():
        if int(op.op_role) == role:
            chunk = chunk_of(op)
            found = [chunk] if chunk is not None else [c for result in op.results() for c in _readers(result, role)]
            if found and op.name() == "dist_op.reshard":
                source, target = op.operand_source(0).process_mesh, op.result(0).process_mesh
                if source != target:
                    found = [_sent_in(_order(role)[0](found), role, source, target)]
            chunks += found
    return chunks


def _communicator(ranks: tuple[int, int], backward: bool) -> Any:
    """The group of a sender and a receiver for a phase; all ranks ask for all groups, so that they number them alike."""
    same = [g for g in process_group.get_all_process_groups() if g.id and tuple(g.ranks) == ranks]
    while len(same) <= backward:
        same.append(process_group.new_process_group(list(ranks), force_new_group=True, group_type="p2p"))
    return same[backward]
