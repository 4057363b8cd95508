"""Changes to Paddle, to the programs that it makes and to its strategies, for legacy programs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from paddle_rbt_plugin.patching import ENGINES_OF_SCRIPTS, Attribute, Setting, on_cpu, paddle_change


@paddle_change(">=2.6,<3.4", lacking=on_cpu, permanent=ENGINES_OF_SCRIPTS)
def engine_starts_without_cuda() -> Iterator[Setting]:
    """Gives ``auto.Engine`` a cluster on a CPU build.

    Reason: without ``cluster=`` the engine asks the CUDA device for its properties, which raises on a CPU wheel. What the
    cluster says is only read by Paddle's own tuner and cost estimator.
    """
    import paddle
    from paddle.distributed.auto_parallel.static import engine

    original = engine.get_default_cluster

    @functools.wraps(original)
    def get_default_cluster(json_config: Any = None, *args: Any) -> Any:
        if json_config and "cluster" in json_config:
            return original(json_config, *args)
        cluster = engine.Cluster()
        cluster.gen_default_config_cluster(node_count=1, device_count=paddle.distributed.get_world_size())
        return cluster

    yield Attribute(engine, "get_default_cluster", get_default_cluster)


def reduce_norms_on_cpu(programs: Iterable[Any], ranks: Iterable[int]) -> None:
    """Lets partitioned programs sum the squares of all gradients between the CPU processes ``ranks``, for clipping.

    Reason: that sum runs on ring 0, of which gloo has no communicator in static programs (``ProcessGroup.instantiate`` leaves
    it out, for making it again would hang), and the executor then looks for a device that has one: ``interface not found``.
    The ring that is made of the same ranks takes its place.
    """
    from paddle.distributed.auto_parallel.static.process_group import new_process_group

    ring = new_process_group(sorted(ranks)).id
    for op in (op for program in programs for op in program.global_block().ops):
        if op.has_attr("ring_id") and op.attr("ring_id") == 0:
            op._set_attr("ring_id", ring)


def leave_out_sequence_parallel_pass(strategy: Any) -> None:
    """Keeps Paddle from fusing an all-reduce and the split of its result into a reduce-scatter, in an engine's own strategy.

    Reason: the pass, which is on by default, asks the all-reduce for an input that has another name since 3.0, ``Input X cannot
    be found in operator all_reduce``, where an op reads a sum cut, which ``check_batches`` refuses with its reason; and CPUs
    have no reduce-scatter. Plans of legacy programs have no sequence parallelism.
    """
    if hasattr(strategy, "sp_optimization"):
        strategy.sp_optimization.enable = False


@paddle_change(">=3.0,<3.4", lacking=on_cpu)
def cpu_needs_no_synchronization() -> Iterator[Setting]:
    """Lets ``auto.Engine`` hand the parameters of a dygraph model to its legacy program on a CPU build.

    Reason: ``ProgramHelper.init`` synchronises the device after each parameter, and ``paddle.device.synchronize`` raises
    TypeError for a CPU, where there is nothing to wait for.
    """
    import paddle

    yield Attribute(paddle.device, "synchronize", lambda *_: None)
