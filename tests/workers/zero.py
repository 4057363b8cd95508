"""Run by paddle.distributed.launch: training with divided states, or in one process without the tuner.

    python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo zero.py ENTRY SPACE STEPS CLIP SHARDING OUT

``ENTRY`` is engine or to_static; ``SPACE`` is JSON; each of three updates has ``STEPS`` micro batches, the losses are written.
``CLIP`` is the global norm that gradients are clipped to, 0 for none; ``SHARDING`` the stage of ``strategy.sharding``.
"""

from __future__ import annotations

import json
import sys

import paddle
import paddle.distributed as dist
from entry_points import BATCH, CONFIG, Logits
from paddle.distributed.fleet import auto

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.models import build, input_spec, sample_batch

UPDATES = 3


def train(entry: str, space: dict, steps: int, clip: float, stage: int) -> dict:
    paddle.seed(2024)
    model = build(CONFIG)
    network = Logits(model)
    batches = [sample_batch(CONFIG, BATCH, seed) for seed in range(UPDATES)]
    grad_clip = paddle.nn.ClipGradByGlobalNorm(clip) if clip else None
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=network.parameters(), grad_clip=grad_clip)
    if dist.get_world_size() == 1:
        losses = []
        for batch in batches:  # equal micro batches: the mean of their gradients is the gradient of the batch
            loss = model(*(paddle.to_tensor(value) for value in batch.values()))
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(float(loss))
        return {"losses": losses}

    tuning = {"enable": True, "pass_name": "rule_based_tuner", "search_space": space}
    config = {"tuning": tuning, "sharding": {"enable": bool(stage), "stage": stage}}
    config["gradient_merge"] = {"enable": steps > 1, "k_steps": steps, "avg": True}
    if entry == "to_static":
        spec = input_spec(CONFIG, BATCH)
        model = dist.to_static(network, None, model.criterion, optimizer, dist.Strategy(config), [spec[:3], spec[3:]])
        model.train()
        plan, engine = rbt.engine_plan(model), model._engine
        losses = [float(model(*batch)) for batch in plan.shard_dataloader([list(b.values()) for b in batches])]
    else:
        engine = auto.Engine(network, model.criterion, optimizer, strategy=auto.Strategy(config))
        spec = input_spec(CONFIG, BATCH)
        engine.prepare(spec[:3], spec[3:], mode="train")
        plan = rbt.engine_plan(engine)
        rows = BATCH // plan.degrees["dp"]
        part = plan.stages[0].process_mesh.coordinate(dist.get_rank(), "dp")
        feeds = [{k: v[part * rows : (part + 1) * rows] for k, v in batch.items()} for batch in batches]
        losses = [engine.run(feed)["loss"].tolist() for feed in feeds]
    updates = [op for op in engine.main_program.global_block().ops if op.name() == "pd_op.adamw_"]
    moments = [op.operand_source(op.get_input_names().index("moment1")) for op in updates]
    return {"plan": plan.to_dict(), "losses": losses, "moments": [value.shape for value in moments]}


if __name__ == "__main__":
    paddle.set_device("cpu")
    entry, space, steps, clip, stage, out = sys.argv[1:]
    if dist.get_world_size() > 1:
        dist.init_parallel_env()
    result = train(entry, json.loads(space), int(steps), float(clip), int(stage))
    if dist.get_rank() == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(result, file)
