"""Changes to how Paddle traces, completes and partitions PIR programs, and makes the jobs of a rank."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

from paddle_rbt_plugin.completion.distributed_ops import placed, placement_of
from paddle_rbt_plugin.completion.operands import GRADIENTS_MAY_BE_PARTIAL
from paddle_rbt_plugin.graph.pir import is_present, plain_attrs
from paddle_rbt_plugin.graph.random_ops import SEED_OP, draws, draws_again_the_same
from paddle_rbt_plugin.handover.pir import chunks, updates
from paddle_rbt_plugin.handover.shared.gloo import reshard_through_whole
from paddle_rbt_plugin.patching import Attribute, Listed, Setting, paddle_change

_PASS_ALONE = "a script that applies the pass rule_based_tuner alone continues with Paddle's passes after it has returned"


@paddle_change(">=3.0,<3.4")
def native_tracing() -> Iterator[Setting]:
    """Lets the Python of a Layer run as it is while ``to_static`` traces it.

    Reason: dy2static transcribes every function it meets, which takes up to minutes for models from packages and can end in
    RecursionError. Only a model whose Python branches on the value of a tensor needs the transcription.
    """
    from paddle.jit import dy2static

    yield Attribute(dy2static, "Call", lambda function: function)


@paddle_change(">=3.0,<3.4")
def traces_record_apart() -> Iterator[Setting]:
    """Lets each trace record the parameters it meets, and what is changed in place, in a place of its own.

    Reason: Paddle keeps these records by the address of the program and drops them at the end of a trace, unless the trace
    fails. A later program at the same address then gets parameters of one that is gone, and the process ends.
    """
    records = trace_records()
    yield Attribute(records._global_parameter_recorder, "params_dict", {})
    yield Attribute(records._global_parameter_recorder, "tensor2value", {})
    yield Attribute(records._global_inplace_map, "params_dict", {})


def trace_records() -> Any:
    """Paddle's module that holds the records of traces."""
    try:
        from paddle.jit.dy2static import parameter_recorder
    except ImportError:  # before 3.3
        from paddle.jit.pir_dy2static import parameter_recorder
    return parameter_recorder


@paddle_change(">=3.0,<3.4", permanent=_PASS_ALONE)
def averages_as_sums() -> Iterator[Setting]:
    """Lets partial averages be made whole where no communication can average: between CPUs, and on a single rank.

    Reason: gloo has no such reduction; and Paddle removes reductions of a single rank, for which it makes no communicator, but
    for averages, which then end the first step.
    """
    import paddle
    from paddle.distributed import ReduceType
    from paddle.distributed.auto_parallel.static.reshard_funcs.p_to_r_reshard_func import PToRReshardFunction

    original = PToRReshardFunction.reshard

    @functools.wraps(original)
    def reshard(function: Any, source: Any, target: Any, value: Any, target_type: Any) -> Any:
        mesh = source.process_mesh
        can_average = paddle.is_compiled_with_cuda() and len(mesh.process_ids) > 1
        if can_average or source.partial_status[0] != ReduceType.kRedAvg:
            return original(function, source, target, value, target_type)
        summands = paddle.base.libpaddle.pir.create_tensor_dist_attribute(mesh, source.dims_mapping, {0: ReduceType.kRedSum})
        total = original(function, summands, target, value, target_type)
        return total if len(mesh.process_ids) == 1 else paddle.scale(total, 1.0 / len(mesh.process_ids))

    yield Attribute(PToRReshardFunction, "reshard", reshard)


@paddle_change(">=3.0,<3.4", permanent=_PASS_ALONE)
def shards_become_partial() -> Iterator[Setting]:
    """Adds the one change of placement that static PIR lacks, from sharded to partial: gathered first, as dygraph does it.

    Reason: where a partial result goes on sharded, as that of experts divided over the data-parallel ranks does, autodiff makes
    its gradient partial: ``There is no reshard function that matches src_dist_attr``.
    """
    from paddle.distributed.auto_parallel.static.reshard_funcs import base_reshard_func as base

    class ShardToPartial(base.ReshardFunction):
        reshard = reshard_through_whole

        def is_suitable(self, source: Any, target: Any) -> bool:
            mesh = source.process_mesh
            shards_to_partial = not base.is_partial(source) and base.is_shard(source) and base.is_partial(target)
            return shards_to_partial and not base.is_shard(target) and mesh == target.process_mesh and mesh.ndim == 1

    yield Listed(base._g_reshard_func_list, ShardToPartial())


@paddle_change(">=3.0,<3.4", permanent=_PASS_ALONE)
def recomputed_ops_draw_the_same() -> Iterator[Setting]:
    """Lets Paddle's recompute pass leave out what would draw other random numbers when it runs again: the seeds that ops read,
    and random ops that read none. Their results are kept instead.

    Reason: the pass means to leave out the seeds of dropout, but looks for an op called ``seed`` where PIR says ``pd_op.seed``;
    other random ops it runs again.
    """
    from paddle.distributed.passes.auto_parallel_recompute_pir import AutoParallelRecomputePIRPass

    def stays(self: Any, op: Any) -> bool:
        type_ = op.name().removeprefix("pd_op.")
        return type_ == SEED_OP or (draws(type_, plain_attrs(op)) and not draws_again_the_same(type_))

    yield Attribute(AutoParallelRecomputePIRPass, "is_seed_used_by_dropout", stays)


@paddle_change(">=3.0,<3.4", permanent=_PASS_ALONE)
def recomputed_regions_read_what_is_kept() -> Iterator[Setting]:
    """Lets Paddle's recompute pass copy the last region first.

    Reason: it copies the regions in program order, and what a copy reads of an earlier region is that region's copy, which
    backward runs later: where a region reads more of another one than its last result, the program uses values before they are
    made, and the process is aborted.
    """
    from paddle.distributed.passes.auto_parallel_recompute_pir import AutoParallelRecomputePIRPass as Pass

    original = Pass.get_segments

    @functools.wraps(original)
    def get_segments(self: Any) -> dict[Any, Any]:
        return dict(sorted(original(self).items(), key=lambda item: item[1][0], reverse=True))

    yield Attribute(Pass, "get_segments", get_segments)


@paddle_change(">=3.0,<3.4", permanent=_PASS_ALONE)
def absent_operands_passed_over() -> Iterator[Setting]:
    """Lets Paddle give distributed attributes to ops some of whose operands are absent.

    Reason: it asks the op that makes each operand which is not distributed, and nothing makes one that is absent:
    ``'NoneType' object has no attribute 'dist_attr'``. Interpolation on local tensors is such an op.
    """
    import paddle
    from paddle.distributed.auto_parallel.static import mix_to_dist_pass, pir_pass

    pir, original = paddle.base.libpaddle.pir, mix_to_dist_pass._complete_op_dist_attr

    @functools.wraps(original)
    def complete(program: Any, block: Any = None) -> None:
        ops = (block or program.global_block()).ops
        mesh = next((op.dist_attr.process_mesh for op in ops if op.dist_attr is not None), None)
        for op in ops if mesh is not None else ():
            operands = op.operands_source()
            if op.dist_attr is None and not all(map(is_present, operands)):
                nothing = [pir.Attribute()]
                op.dist_attr = pir.create_op_dist_attribute(mesh, nothing * len(operands), nothing * len(op.results()))
        original(program, block)

    for module in (mix_to_dist_pass, pir_pass):
        yield Attribute(module, "_complete_op_dist_attr", complete)


_PARTITION = (
    averages_as_sums,
    shards_become_partial,
    recomputed_ops_draw_the_same,
    recomputed_regions_read_what_is_kept,
    absent_operands_passed_over,
)


def install_for_pass_alone() -> None:
    """Changes Paddle for programs that a caller of the pass ``rule_based_tuner`` completes and partitions itself."""
    for change in _PARTITION:
        change.install()


@contextlib.contextmanager
def exact_partition() -> Iterator[None]:
    """The context in which Paddle adds the backward pass to an annotated program and partitions it."""
    with contextlib.ExitStack() as stack:
        for change in (*_PARTITION, gradients_whole, partition_prepared, gradients_accumulated_as_read):
            stack.enter_context(change.apply())
        yield


@paddle_change(">=3.0,<3.4")
def gradients_whole() -> Iterator[Setting]:
    """Lets Paddle build gradient ops on gradients that are whole sums and lie as what they are gradients of where that is free,
    while it makes a program.

    Reason: the rules of some gradient ops are wrong for partial gradients: that of ``expand`` takes summands for the sum, that
    of ``divide`` reads other values of the quotient on each rank, ``concat`` divides the batch among them, and
    ``matmul`` refuses the whole gradient of a divided product. Completion counts what is done here, see
    ``GRADIENTS_MAY_BE_PARTIAL`` and ``Placement.of_gradient``.
    """
    from paddle.base import core

    original = core.call_vjp

    def call_vjp(op: Any, inputs: Any, outputs: Any, gradients: Any, *rest: Any) -> Any:
        if op.name().split(".", 1)[1].removesuffix("_") not in GRADIENTS_MAY_BE_PARTIAL:
            pairs = [zip(of, values, strict=True) for of, values in zip(gradients, outputs, strict=True)]
            gradients = [[_of_gradient(g, value) for g, value in of] for of in pairs]
        return original(op, inputs, outputs, gradients, *rest)

    yield Attribute(core, "call_vjp", call_vjp)


def _of_gradient(gradient: Any, value: Any) -> Any:
    if not is_present(gradient) or not gradient.is_dist() or not value.is_dist():
        return gradient
    return placed(gradient, placement_of(gradient).of_gradient(placement_of(value)))


@paddle_change(">=3.0,<3.4")
def partition_prepared() -> Iterator[Setting]:
    """Puts right what the partition pass takes as it is: the tensors of lists, updates without a rule, and states that no
    update reads.

    Reason: the pass reshards a result that an op makes otherwise than its type says, but passes by lists, whose tensors are the
    results of ``builtin.split``: a shard, as the gradients that ``concat`` has may be, is then read as if it were the whole
    tensor. For updates see ``updates``. The states of parameters that nothing reads stay without a placement, on which the
    engine fails (``_local_shape is only for distdense tensor``).
    """
    from paddle.distributed.auto_parallel.static import engine, pir_pass

    original = pir_pass.apply_partition_pass

    def apply(program: Any, block: Any = None) -> None:
        if block is None:
            _reshard_lists(program)
            updates.shard_updates(program)
            _drop_unread_states(program)
        original(program, block)

    yield Attribute(pir_pass, "apply_partition_pass", apply)
    yield Attribute(engine, "apply_partition_pass", apply)


@paddle_change(">=3.0,<3.4")
def gradients_accumulated_as_read() -> Iterator[Setting]:
    """Names the gradients of parameters as the update reads them.

    Reason: where an op makes the gradient of a parameter otherwise than the parameter lies, as the lookup of a divided table
    that was gathered does, the partition pass brings it there, but the list of gradients goes on with what the op makes.
    Accumulation adds that up, and the update reads the gradient of the last micro batch alone.
    """
    from paddle.distributed.auto_parallel.static.pir_pass import ReshardPasses
    from paddle.distributed.fleet.meta_optimizers.common import OpRole

    original = ReshardPasses.apply_reshard_pass

    def as_read(parameter: Any, gradient: Any) -> Any:
        readers = gradient.all_used_ops() if gradient is not None and gradient.is_dist() else []
        if len(readers) != 1 or readers[0].name() != "dist_op.reshard" or int(readers[0].op_role) != int(OpRole.Backward):
            return gradient
        arrived = readers[0].result(0)
        return arrived if arrived.dist_attr() == parameter.dist_attr() else gradient

    def apply(program: Any, params_grads: Any = None) -> None:
        for i, (parameter, gradient) in enumerate(params_grads or ()):
            params_grads[i] = (parameter, as_read(parameter, gradient))
        original(program, params_grads)

    yield Attribute(ReshardPasses, "apply_reshard_pass", staticmethod(apply))


def _drop_unread_states(program: Any) -> None:
    for op in program.global_block().ops:
        if op.name() == "pd_op.data" and op.result(0).use_empty() and not op.result(0).is_dist():
            op.erase()


def _reshard_lists(program: Any) -> None:
    import paddle
    from paddle.base.framework import pir_op_role_guard

    for op in program.global_block().ops:
        source = op.operand_source(0).get_defining_op() if op.name() == "builtin.split" else None
        if source is None or source.dist_attr is None or source.dist_attr.num_results() != 1:
            continue
        made = source.dist_attr.result(0).as_array_attr()
        for i, value in enumerate(op.results()):
            if made is None or not value.is_dist() or value.use_empty() or value.dist_attr() == made[i].as_tensor_dist_attr():
                continue
            wanted = value.dist_attr()
            value.update_dist_attr(made[i].as_tensor_dist_attr())
            paddle.pir.set_insertion_point_after(op)
            with pir_op_role_guard(source.op_role):
                arrived = paddle._C_ops.reshard_v2(value, wanted)
            value.replace_all_uses_with(arrived)
            arrived.get_defining_op().operand(0).set_source(value)


@paddle_change(">=3.1,<3.4")
def chunks_as_marked() -> Iterator[Setting]:
    """Lets Paddle's interleaved schedule run the chunks that ops are marked with (see ``chunks``), while it makes a program.

    Reason: the engine gives chunks to ops by the names of Layers and refuses ops between two such Layers, where a plan's chunks
    are any runs of ops. A receive takes the chunk of whichever reader is found first, which may not run first; a gradient that
    is summed over chunks is refused; a sum of gradients takes the chunk of the stage that made the value; and on communicators
    that both phases share the messages of one take the place of the other's.
    """
    from paddle.distributed.auto_parallel.static import engine
    from paddle.distributed.auto_parallel.static.pir_pass import ReshardPasses
    from paddle.distributed.auto_parallel.static.reshard_funcs.same_status_reshard_func import SameStatusReshardFunction

    resolve = ReshardPasses.apply_reshard_pass

    def settle_and_resolve(program: Any, *gradients: Any) -> None:
        chunks.settle(program)
        resolve(program, *gradients)

    yield Attribute(engine, "complete_chunk_id", lambda *_: None)
    yield Attribute(ReshardPasses, "apply_reshard_pass", staticmethod(settle_and_resolve))
    yield Attribute(SameStatusReshardFunction, "reshard", chunks.exchange)
    yield Attribute(engine, "check_chunk_id", chunks.complete)


@paddle_change(">=3.0,<3.4")
def receives_awaited() -> Iterator[Setting]:
    """Lets an op of a pipeline's jobs wait for every received value that it is the first to read.

    Reason: Paddle keeps one event per op, that of the value received first, so such an op may read another one, which a cut
    between a sum and its operands sends as well, before it has come.
    """
    from paddle.distributed.passes.pipeline_scheduler_pass import pipeline_1f1b

    classes = (*pipeline_1f1b.Pipeline1F1BPass.__mro__, getattr(pipeline_1f1b, "ProgramSplitter", object))  # the last in 3.0
    owner = next(cls for cls in classes if "_add_dependency" in vars(cls))
    original = owner._add_dependency

    def add(self: Any, recorder: Any, waiter: Any, event: str) -> None:
        awaited = waiter.attrs()["events_to_wait"] if waiter.has_attr("events_to_wait") else []
        original(self, recorder, waiter, event)
        waiter.set_str_array_attr("events_to_wait", [*awaited, event])

    yield Attribute(owner, "_add_dependency", add)


@paddle_change(">=3.0,<3.4", permanent="scripts create strategies before any code of this package runs")
def distributed_strategies_have_tuning() -> Iterator[Setting]:
    """Adds ``tuning`` to ``dist.Strategy`` and carries it to the engine of ``dist.to_static``.

    Reason: only ``auto.Strategy`` has the field, and ``DistModel`` copies a fixed list of fields.
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

    yield Attribute(api.Strategy, "__init__", init)
    yield Attribute(api.DistModel, "_DistModel__convert_strategy", convert)


@paddle_change(">=3.0,<3.4")
def programs_of_ranks_seen(see: Callable[[Any, Any], None]) -> Iterator[Setting]:
    """Gives ``see`` the program that an engine makes for this rank, with its gradients, once nothing else is in it.

    Reason: the engine changes that program further, fuses and schedules it, before it lets anybody have it.
    """
    from paddle.distributed.auto_parallel.static import engine
    from paddle.distributed.auto_parallel.static.pir_pass import RemovePasses

    class Seen(RemovePasses):
        @staticmethod
        def apply_all(program: Any, startup: Any, gradients: Any = ()) -> None:
            RemovePasses.apply_all(program, startup, gradients)
            see(program, gradients)

    yield Attribute(engine, "RemovePasses", Seen)


@paddle_change(">=3.0,<3.4")
def environment_read_anew() -> Iterator[Setting]:
    """Lets Paddle read from the environment once more which rank this process has.

    Reason: it reads it once and keeps it, while programs of several ranks are made in one process here.
    """
    from paddle.distributed import parallel

    yield Attribute(parallel, "_global_parallel_env", None)
