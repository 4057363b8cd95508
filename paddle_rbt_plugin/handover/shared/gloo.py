"""Communication of static programs between CPU processes through gloo."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.shared import gloo_paddle_2
from paddle_rbt_plugin.patching import Attribute, Flag, Setting, on_cpu, paddle_change


def enable_static_training_on_cpu(meshes: Sequence[Any]) -> None:
    """Makes static PIR programs communicate between CPU processes through gloo. Does nothing on a GPU build.

    ``meshes`` are Paddle process meshes; their communication groups are created here, in the same order on every rank. Group
    ids are counted per rank, and gloo's store keys contain only the id, so ranks that create groups in different orders would
    wait for each other forever.

    Raises TunerError for a mesh with two active axes: there every ring of the CPU executor behaves like the first one used, and
    results are wrong without an error, in Paddle alone as well.
    """
    import paddle
    from paddle.distributed.auto_parallel.static import process_group

    if paddle.base.core.is_compiled_with_cuda() or paddle.distributed.get_world_size() < 2:
        return
    for mesh in meshes:
        if sum(n > 1 for n in mesh.shape) > 1:
            raise TunerError(
                f"static PIR programs on CPU compute wrong numbers on a mesh with two active axes ({mesh.shape}): train on "
                "GPUs, through plan.shard_layer (dygraph), or restrict the search to one axis, e.g. search_space={'mp': 1}"
            )
    if paddle.__version__.startswith("2."):
        gloo_paddle_2.enable_on_cpu_of_paddle_2()
        return
    programs_communicate_through_gloo.install()
    for mesh in meshes:
        ranks = np.array(mesh.process_ids).reshape(mesh.shape)
        rows = (np.moveaxis(ranks, axis, -1).reshape(-1, ranks.shape[axis]) for axis in range(ranks.ndim))
        for group in itertools.chain.from_iterable(rows):
            process_group.new_process_group(sorted(int(rank) for rank in group))
        process_group.new_process_group(sorted(int(rank) for rank in ranks.flatten()))


@paddle_change(">=3.0,<3.4", lacking=on_cpu, permanent="the executor runs such programs until the job ends")
def programs_communicate_through_gloo() -> Iterator[Setting]:
    """Makes static programs communicate between CPU processes.

    Reason: ``ProcessGroup.instantiate`` asserts a CUDA device; ``ProgramHelper.init_pir`` runs a barrier that only NCCL has.
    Only NCCL has reduce-scatter and all-to-all, which are replaced by an all-reduce or all-gather and a slice. The executor
    starts several threads, which run independent ops in any order, so ranks may meet in different collectives.
    """
    import paddle
    from paddle.distributed.auto_parallel.static import process_group
    from paddle.distributed.auto_parallel.static.reshard_funcs import p_to_s_reshard_func, s_to_s_reshard_func

    yield Attribute(p_to_s_reshard_func.PToSReshardFunction, "reshard", reshard_through_whole)
    yield Attribute(s_to_s_reshard_func.SToSReshardFunction, "reshard", reshard_through_whole)
    yield Attribute(process_group.ProcessGroup, "instantiate", _instantiate_gloo)
    yield Flag("FLAGS_enable_pir_in_executor_trace_run", True)
    yield Attribute(paddle._legacy_C_ops, "barrier", lambda *_: paddle.distributed.barrier())


def _instantiate_gloo(group: Any) -> None:
    """Replaces ``ProcessGroup.instantiate``; ring 0 exists since ``init_parallel_env``, and creating it again would hang."""
    from paddle.base import core
    from paddle.distributed.auto_parallel.static import process_group

    rank = process_group._get_global_env().rank
    if not group._is_instantiate and group.id != 0 and group.nranks >= 2 and rank in group.ranks:
        store = core.create_or_get_global_tcp_store()
        core.CommContextManager.create_gloo_comm_context(store, str(group.id), group.local_rank(rank), group.nranks)
    group._is_instantiate = True


def reshard_through_whole(_: Any, source: Any, target: Any, value: Any, target_type: Any) -> Any:
    """A ``ReshardFunction.reshard`` that gathers the whole tensor on every rank, and then takes the part that is needed."""
    import paddle
    from paddle.distributed.auto_parallel.static.reshard_funcs.base_reshard_func import choose_reshard_func

    pir = paddle.base.libpaddle.pir
    whole = pir.create_tensor_dist_attribute(source.process_mesh, [-1] * len(source.dims_mapping), {})
    value = choose_reshard_func(source, whole).reshard(source, whole, value, pir.cvt_to_dist_type(value.type(), whole))
    return choose_reshard_func(whole, target).reshard(whole, target, value, target_type)
