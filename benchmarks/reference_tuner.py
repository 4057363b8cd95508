"""Times Paddle's own rule-based tuner on a GPT, for ``search.py --reference``. Runs on paddlepaddle 3.1.1.

    python benchmarks/reference_tuner.py LAYERS

Prints the seconds of ``RuleBasedTuner.tune`` on one machine of 8 (hidden size 64), as ``auto.Engine`` with
``strategy.auto_mode = "full_rule_based"`` calls it.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ["FLAGS_enable_pir_api"] = "0"  # noqa: SIM112
sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))

import paddle
from paddle.distributed.auto_parallel.static.cluster import Cluster
from paddle.distributed.auto_parallel.static.dist_context import DistributedContext
from paddle.distributed.auto_parallel.static.tuner import rule_based_tuner


def program(layers: int) -> tuple:
    """A GPT of the package's own models as a legacy program."""
    from paddle_rbt_plugin.models import GPTConfig, build, input_spec

    config = GPTConfig(layers=layers, hidden=64, ffn=256, heads=8, vocab=512, seq=64)
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        data = [paddle.static.data(s.name, s.shape, s.dtype) for s in input_spec(config, 8)]
        loss = build(config)(*data)
    return main, startup, loss


def tune_seconds(layers: int) -> dict[str, float]:
    """Wall and CPU seconds."""
    paddle.enable_static()
    main, startup, loss = program(layers)
    cluster = Cluster()
    cluster.gen_default_config_cluster(node_count=1, device_count=8)
    optimizer = paddle.optimizer.AdamW(1e-5, grad_clip=paddle.nn.ClipGradByGlobalNorm(0.2))
    context = DistributedContext(
        serial_main_prog=main, serial_startup_prog=startup, serial_optimizer=optimizer, serial_loss=loss, cluster=cluster
    )
    context.initialize()
    rule_based_tuner.print_program_with_dist_attr = lambda *args, **kwargs: None  # it prints every program it tries
    tuner = rule_based_tuner.RuleBasedTuner(context, mode="train", level="o1")
    start, cpu = time.perf_counter(), time.process_time()
    tuner.tune()
    return {"tune_s": time.perf_counter() - start, "tune_cpu_s": time.process_time() - cpu}


if __name__ == "__main__":
    print("RESULT" + json.dumps(tune_seconds(int(sys.argv[1])) | {"paddle": paddle.__version__}))
