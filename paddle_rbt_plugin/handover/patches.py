"""Every change this package makes to Paddle at run time, each with its reason and the versions it is needed for.

``tests/test_patches.py`` shows for each that Paddle still needs it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


@contextlib.contextmanager
def native_tracing() -> Iterator[None]:
    """Lets the Python of a Layer run as it is while ``to_static`` traces it.

    Reason: dy2static transcribes every function it meets, which takes up to minutes for models from packages and can end in
    RecursionError. Only a model whose Python branches on the value of a tensor needs the transcription.
    Versions: 3.0 to 3.3.
    """
    from paddle.jit import dy2static

    original = dy2static.Call
    dy2static.Call = lambda function: function
    try:
        yield
    finally:
        dy2static.Call = original


def enable_static_training_on_cpu(meshes: Sequence[Any]) -> None:
    """Lets a static PIR program communicate between CPU processes through gloo. Does nothing on a GPU build.

    ``meshes`` are Paddle process meshes; the communication groups of each are made here, in the same order on every rank.
    Reason: ``ProcessGroup.instantiate`` asserts a CUDA device; group ids are counted per rank while gloo's store keys hold
    nothing but the id, so ranks that create their groups in different orders wait for each other forever;
    ``ProgramHelper.init_pir`` runs a barrier that only NCCL has. Versions: 3.0 to 3.3.

    Raises TunerError for a mesh with two active axes: there every ring of the CPU executor behaves as the first one used,
    and the results are wrong without an error (native Paddle included).
    """
    import paddle
    from paddle.distributed.auto_parallel.static import process_group

    from paddle_rbt_plugin.errors import TunerError

    if paddle.base.core.is_compiled_with_cuda() or paddle.distributed.get_world_size() < 2:
        return
    for mesh in meshes:
        if sum(n > 1 for n in mesh.shape) > 1:
            raise TunerError(
                f"static PIR programs on CPU compute wrong numbers on a mesh with two active axes ({mesh.shape}): train on "
                "GPUs, through plan.shard_layer (dygraph), or restrict the search to one axis, e.g. search_space={'mp': 1}"
            )
    process_group.ProcessGroup.instantiate = _instantiate_gloo
    paddle._legacy_C_ops.barrier = lambda *_: paddle.distributed.barrier()
    for mesh in meshes:
        ranks = np.array(mesh.process_ids).reshape(mesh.shape)
        rows = (np.moveaxis(ranks, axis, -1).reshape(-1, ranks.shape[axis]) for axis in range(ranks.ndim))
        for group in itertools.chain.from_iterable(rows):
            process_group.new_process_group(sorted(int(rank) for rank in group))
        process_group.new_process_group(sorted(int(rank) for rank in ranks.flatten()))


def _instantiate_gloo(group: Any) -> None:
    """Replaces ``ProcessGroup.instantiate``; ring 0 exists since ``init_parallel_env``, and making it again would hang."""
    from paddle.base import core
    from paddle.distributed.auto_parallel.static import process_group

    rank = process_group._get_global_env().rank
    if not group._is_instantiate and group.id != 0 and group.nranks >= 2 and rank in group.ranks:
        store = core.create_or_get_global_tcp_store()
        core.CommContextManager.create_gloo_comm_context(store, str(group.id), group.local_rank(rank), group.nranks)
    group._is_instantiate = True
