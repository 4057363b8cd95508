"""Paddle's own rule-based tuner, which ``auto_mode = "full_rule_based"`` runs, as something to compare with.

It reads legacy programs, so Paddle is imported with ``FLAGS_enable_pir_api=0``. It knows pp, dp and mp of one machine of equal
devices, with one micro batch per step and without recomputation, ZeRO or sequence parallelism.
"""

from __future__ import annotations

import logging
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import paddle

from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.legacy.ops import legacy_static_ops

KNOWN_DEVICES = ("V100", "A100", "H100")
"""Devices of ours that Paddle's generator of cluster descriptions knows, by the start of their names."""


def reference_degrees(main: Any, startup: Any, loss: Any, inputs: str, cluster: Cluster) -> dict[str, Any]:
    """What Paddle's tuner (level o1) chooses for a serial program: ``pp``, ``dp``, ``mp``, and with both of the last two the
    ``order`` of the axes, in the words of the search space. ``inputs`` is the name of a batched input.

    Raises TunerError for a cluster that it cannot plan for, and whatever Paddle raises."""
    from paddle.distributed.auto_parallel.static.dist_context import DistributedContext
    from paddle.distributed.auto_parallel.static.tuner import rule_based_tuner

    optimizer = paddle.optimizer.AdamW(1e-5, grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0))
    context = DistributedContext(main, startup, optimizer, loss, cluster=_described(cluster))
    context.initialize()
    logging.disable(logging.INFO)
    with legacy_static_ops(), redirect_stdout(StringIO()):  # it prints the whole program at every step
        rule_based_tuner.RuleBasedTuner(context, mode="train", level="o1").tune()
    return _degrees(context, inputs)


def _described(cluster: Cluster) -> Any:
    """The cluster in Paddle's own words, with our figures of its devices."""
    from paddle.distributed.auto_parallel.static.cluster import Cluster as PaddleCluster

    group = cluster.groups[0]
    model = next((known for known in KNOWN_DEVICES if group.device.name.startswith(known)), None)
    if cluster.machines > 1 or model is None:
        raise TunerError(f"Paddle's own tuner plans for one machine of {', '.join(KNOWN_DEVICES)}, not for {cluster}")
    described = PaddleCluster()
    described.gen_default_config_cluster(
        gpu_model=model,
        node_count=1,
        device_count=group.devices_per_machine,
        gpu_memory=int(group.device.memory / 2**30),
        intra_bandwidth=group.intra_link.bandwidth / 1e9,
        gpu_sp_gflops=group.device.flops("fp32") / 1e9,
        gpu_hp_gflops=group.device.flops("fp16") / 1e9,
    )
    return described


def _degrees(context: Any, inputs: str) -> dict[str, Any]:
    block = context.serial_main_program.global_block()
    meshes: list[Any] = []
    for op in block.ops:
        attr = context.get_op_dist_attr_for_program(op)
        if attr is not None and attr.process_mesh is not None and attr.process_mesh not in meshes:
            meshes.append(attr.process_mesh)
    shape = list(meshes[0].shape)
    batch_axis = context.get_tensor_dist_attr_for_program(block.vars[inputs]).dims_mapping[0]
    dp = shape[batch_axis] if batch_axis >= 0 else 1
    found: dict[str, Any] = {"pp": len(meshes), "dp": dp, "mp": len(meshes[0].process_ids) // dp}
    return found | ({"order": "mp_dp" if batch_axis == 1 else "dp_mp"} if len(shape) > 1 else {})
