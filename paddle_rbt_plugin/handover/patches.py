"""Every change this package makes to Paddle at run time, each with its reason and the versions it is needed for.

``tests/test_patches.py`` shows for each that Paddle still needs it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.legacy import communication as legacy_communication


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
    ``ProgramHelper.init_pir`` runs a barrier that only NCCL has, and so are reduce-scatter and all-to-all, which become an
    all-reduce or all-gather and a slice. Versions: 3.0 to 3.3.

    Raises TunerError for a mesh with two active axes: there every ring of the CPU executor behaves as the first one used,
    and the results are wrong without an error (native Paddle included).
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
        legacy_communication.enable_on_cpu_of_paddle_2()
        return
    from paddle.distributed.auto_parallel.static.reshard_funcs import p_to_s_reshard_func, s_to_s_reshard_func

    p_to_s_reshard_func.PToSReshardFunction.reshard = _reshard_through_whole
    s_to_s_reshard_func.SToSReshardFunction.reshard = _reshard_through_whole
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


def let_shards_become_partial() -> None:
    """Adds the one change of placement that static PIR lacks, from sharded to partial: gathered first, as dygraph does it.

    Reason: where a partial result goes on sharded, as that of experts divided over the data-parallel ranks does, autodiff makes
    its gradient partial: ``There is no reshard function that matches src_dist_attr``. Versions: 3.0 to 3.3.
    """
    from paddle.distributed.auto_parallel.static.reshard_funcs import base_reshard_func as base

    class ShardToPartial(base.ReshardFunction):
        reshard = _reshard_through_whole

        def is_suitable(self, source: Any, target: Any) -> bool:
            mesh = source.process_mesh
            shards_to_partial = not base.is_partial(source) and base.is_shard(source) and base.is_partial(target)
            return shards_to_partial and not base.is_shard(target) and mesh == target.process_mesh and mesh.ndim == 1

    base.register_reshard_func(ShardToPartial())


def _reshard_through_whole(_: Any, source: Any, target: Any, value: Any, target_type: Any) -> Any:
    """A ``ReshardFunction.reshard`` that makes the whole tensor on every rank, and then what is wanted of it."""
    import paddle
    from paddle.distributed.auto_parallel.static.reshard_funcs.base_reshard_func import choose_reshard_func

    pir = paddle.base.libpaddle.pir
    whole = pir.create_tensor_dist_attribute(source.process_mesh, [-1] * len(source.dims_mapping), {})
    value = choose_reshard_func(source, whole).reshard(source, whole, value, pir.cvt_to_dist_type(value.type(), whole))
    return choose_reshard_func(whole, target).reshard(whole, target, value, target_type)


@contextlib.contextmanager
def chunks_as_marked() -> Iterator[None]:
    """Lets Paddle's interleaved schedule run the chunks that ops are marked with (see ``chunks``), while it makes a program.

    Reason: the engine gives chunks to ops by the names of Layers and refuses ops between two such Layers, where a plan's chunks
    are any runs of ops. A receive takes the chunk of whichever reader is found first, which may not run first; a gradient that
    is summed over chunks is refused; a sum of gradients takes the chunk of the stage that made the value; and on communicators
    that both phases share the messages of one take the place of the other's. Versions: 3.1 to 3.3.
    """
    from paddle.distributed.auto_parallel.static import engine
    from paddle.distributed.auto_parallel.static.pir_pass import ReshardPasses
    from paddle.distributed.auto_parallel.static.reshard_funcs.same_status_reshard_func import SameStatusReshardFunction

    from paddle_rbt_plugin.handover import chunks

    resolve = ReshardPasses.apply_reshard_pass

    def settle_and_resolve(program: Any, *gradients: Any) -> None:
        chunks.settle(program)
        resolve(program, *gradients)

    with (
        _replaced(engine, "complete_chunk_id", lambda *_: None),
        _replaced(ReshardPasses, "apply_reshard_pass", staticmethod(settle_and_resolve)),
        _replaced(SameStatusReshardFunction, "reshard", chunks.exchange),
        _replaced(engine, "check_chunk_id", chunks.complete),
    ):
        yield


@contextlib.contextmanager
def receives_awaited() -> Iterator[None]:
    """Lets an op of a pipeline's jobs wait for every received value that it is the first to read.

    Reason: Paddle keeps one event per op, that of the value received first, so such an op may read another one, which a cut
    between a sum and its operands sends as well, before it has come. Versions: 3.0 to 3.3.
    """
    from paddle.distributed.passes.pipeline_scheduler_pass import pipeline_1f1b

    classes = (*pipeline_1f1b.Pipeline1F1BPass.__mro__, getattr(pipeline_1f1b, "ProgramSplitter", object))  # the last in 3.0
    owner = next(cls for cls in classes if "_add_dependency" in vars(cls))
    original = owner._add_dependency

    def add(self: Any, recorder: Any, waiter: Any, event: str) -> None:
        awaited = waiter.attrs()["events_to_wait"] if waiter.has_attr("events_to_wait") else []
        original(self, recorder, waiter, event)
        waiter.set_str_array_attr("events_to_wait", [*awaited, event])

    with _replaced(owner, "_add_dependency", add):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def give_distributed_strategy_tuning() -> None:
    """Adds ``tuning`` to ``dist.Strategy`` and carries it to the engine of ``dist.to_static``.

    Reason: only ``auto.Strategy`` has the field, and ``DistModel`` copies a fixed list of fields. Versions: 3.0 to 3.3.
    """
    from paddle.distributed.auto_parallel import api
    from paddle.distributed.auto_parallel.strategy import TuningConfig

    original_init = api.Strategy.__init__
    original_convert = api.DistModel._DistModel__convert_strategy

    @functools.wraps(original_init)
    def init(strategy: Any, config: Any = None) -> None:
        original_init(strategy, config)
        strategy.tuning = TuningConfig(strategy._config_dict.get("tuning"))

    @functools.wraps(original_convert)
    def convert(model: Any, strategy: Any) -> Any:
        inner = original_convert(model, strategy)
        if inner is not None and hasattr(strategy, "tuning"):
            inner.tuning = copy.deepcopy(strategy.tuning)
        return inner

    api.Strategy.__init__ = init
    api.DistModel._DistModel__convert_strategy = convert


def tell_engine_its_data_rank(engine: Any, mesh: ProcessMesh) -> None:
    """Sets what the planner of the legacy IR sets and PIR does not: how the data is split over ranks, and which part this
    rank reads. Versions: 3.0 to 3.3."""
    import paddle

    rank = paddle.distributed.get_rank()
    inputs = len(engine._inputs_spec) + len(engine._labels_spec)
    engine._dp_world_sizes = [mesh.degree("dp")] * inputs
    engine._dp_ranks = [mesh.coordinate(rank, "dp")] * inputs


def let_engine_fit_in_pir() -> None:
    """Makes ``Engine.fit``, ``evaluate``, ``predict`` and ``prepare`` + ``run`` work on PIR programs.

    Reason: they read ``_dist_contexts``, which PIR leaves empty: ``fit`` fails in ``_validate_batch_size`` and, past it, in
    ``_prepare_dataloader``, ``_prepare_fetch``, ``optimizer`` and ``_prepare_logger``; ``run`` fails in ``_prepare_reader``.
    Past these, ``fit`` asks the optimizer that mixed precision wraps for a learning rate, which it has not, and cuts a batch
    into micro batches that the jobs of gradient merge cut again. Engines that are not in PIR mode keep Paddle's methods.
    Versions: 3.0 to 3.3.
    """
    from paddle.distributed.auto_parallel.static.engine import Engine

    def in_pir(original: Any, replacement: Any) -> Any:
        @functools.wraps(original)
        def method(engine: Any, *args: Any, **kwargs: Any) -> Any:
            return (replacement if engine._in_pir_mode else original)(engine, *args, **kwargs)

        return method

    Engine._prepare_dataloader = in_pir(Engine._prepare_dataloader, _pir_dataloader)
    Engine._prepare_fetch = in_pir(Engine._prepare_fetch, _pir_fetch)
    Engine._prepare_logger = in_pir(Engine._prepare_logger, _pir_logs)
    Engine._prepare_reader = in_pir(Engine._prepare_reader, lambda engine, feed_list=(): None)
    Engine.optimizer = property(in_pir(Engine.optimizer.fget, lambda e: getattr(e._optimizer, "_optimizer", e._optimizer)))
    cut = Engine._validate_batch
    Engine._validate_batch = in_pir(cut, lambda engine, batch: batch if engine._mode == "train" else cut(engine, batch))


def _pir_dataloader(
    engine: Any,
    dataset: Any,
    return_list: bool = True,
    batch_size: int = 1,
    shuffle: bool = False,
    drop_last: bool = True,
    collate_fn: Any = None,
    num_workers: int = 0,
    **_: Any,
) -> Any:
    """Batches of this rank's part of a dataset, each a list of one dict of arrays by feed name; the parts of all ranks make
    the batches that a single process would read."""
    import paddle

    names = engine.get_feed_name_list()
    replicas, rank = engine._dp_world_sizes[0], engine._dp_ranks[0]

    def collate(samples: list[Any]) -> list[dict[str, Any]]:
        batch = collate_fn(samples) if collate_fn else [np.stack(column) for column in zip(*map(_flat, samples), strict=True)]
        return [dict(zip(names, _flat(batch), strict=False))]

    if isinstance(dataset, paddle.io.IterableDataset):
        return _StridedBatches(dataset, batch_size, replicas, rank, collate)
    sampler = paddle.io.DistributedBatchSampler(
        dataset, batch_size, num_replicas=replicas, rank=rank, shuffle=shuffle, drop_last=drop_last
    )
    return paddle.io.DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=num_workers, return_list=True)


class _StridedBatches:
    """Whole batches of an iterable dataset, of which this rank keeps its part; a last, smaller batch is dropped."""

    def __init__(self, dataset: Any, batch_size: int, replicas: int, rank: int, collate: Any):
        self.dataset, self.size, self.replicas, self.rank, self.collate = dataset, batch_size, replicas, rank, collate

    def __len__(self) -> int:
        return sys.maxsize  # unknown; the engine stops when the iteration does

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.dataset)
        while len(batch := list(itertools.islice(samples, self.size * self.replicas))) == self.size * self.replicas:
            yield self.collate(batch[self.rank * self.size : (self.rank + 1) * self.size])


def _flat(sample: Any) -> list[Any]:
    if isinstance(sample, dict):
        return list(sample.values())
    if isinstance(sample, (list, tuple)):
        return [part for item in sample for part in _flat(item)]
    return [sample]


def _pir_fetch(engine: Any, user_fetches: Any, mode: str) -> tuple[list[Any], list[list[int]]]:
    """The loss, or in prediction every output, as values of the program that runs."""
    program = engine.main_program
    if mode == "train" and engine._job_plan is not None:  # of the jobs of a micro batch, the last forward one makes the loss
        pipeline = engine._strategy.pipeline
        last = pipeline.vpp_degree - 1 if pipeline.enable and pipeline.schedule_mode == "VPP" else ""
        program = engine._job_plan.ir_program(f"forward{last}")
    outputs = [op for op in program.global_block().ops if op.name() == "builtin.shadow_output"]
    by_name = {op.attrs()["output_name"]: op.operand_source(0) for op in outputs}
    if mode == "predict":
        values = [v for v in by_name.values() if v.initialized()]
        return values, [list(range(len(values)))]
    loss = by_name.get(engine._loss_names[0])
    return ([loss], [[0]]) if loss is not None and loss.initialized() else ([], [[]])


def _pir_logs(
    engine: Any,
    outs: Any,
    epoch: Any = None,
    step: Any = None,
    lr: Any = None,
    fetch_names: Any = None,
    fetch_indices: Any = None,
    mode: Any = None,
) -> dict[str, Any]:
    logs = {"epoch": epoch, "step": None if step is None else step + 1, "lr": lr}
    logs = {key: value for key, value in logs.items() if value is not None}
    values = [outs[i] for i in fetch_indices[0]]
    if mode == "predict":
        logs["outputs"] = {f"out{i}": value for i, value in enumerate(values)}
    elif values:
        logs["loss"] = np.mean(values[0])  # of the micro batches
    return logs | {"fetches": {}}
