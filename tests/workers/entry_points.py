"""Run by paddle.distributed.launch: the same model through every entry point; prints one JSON line per rank.

    python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo entry_points.py ENTRY SPACE STEPS

``ENTRY`` is serial, pass, engine-attributes, engine-dict, engine-merge, engine-amp, engine-run, to_static or dygraph;
``SPACE`` is JSON.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet import auto
from paddle.distributed.passes.pass_base import PassContext, new_pass

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.models import GPTConfig, build, input_spec, sample_batch

BATCH = 8
CONFIG = GPTConfig(layers=2, hidden=32, ffn=64, heads=4, vocab=128, seq=16)


class Logits(nn.Layer):
    """The model without its loss, as Engine and to_static take it."""

    def __init__(self, model: nn.Layer):
        super().__init__()
        self.model = model

    def forward(self, tokens, position_ids, attention_mask):
        x = self.model.gpt(tokens, position_ids, attention_mask)
        return paddle.matmul(x, self.model.gpt.word_embeddings.weight, transpose_y=True)


class Samples(paddle.io.Dataset):
    def __init__(self, batches: list[dict[str, np.ndarray]]):
        self.batches = batches

    def __getitem__(self, index: int):
        values = [column[index % BATCH] for column in self.batches[index // BATCH].values()]
        return tuple(values[:3]), tuple(values[3:])

    def __len__(self) -> int:
        return len(self.batches) * BATCH


class Losses(paddle.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, step, logs=None):
        self.losses.append(float(logs["loss"]))


def run(entry: str, space: dict, steps: int) -> dict:
    paddle.seed(2024)
    model = build(CONFIG)
    batches = [sample_batch(CONFIG, BATCH, seed) for seed in range(steps)]
    spec = input_spec(CONFIG, BATCH)
    tuning = {"enable": True, "pass_name": "rule_based_tuner", "search_space": space}

    if entry == "pass":
        from paddle_rbt_plugin.handover.pir.trace import trace_layer

        program = trace_layer(Logits(model), spec[:3], model.criterion, spec[3:]).program
        context = PassContext()
        new_pass("rule_based_tuner", {"search_space": space}).apply([program], [paddle.static.Program()], context)
        return {"plan": context.get_attr("plan").to_dict(), "losses": []}

    if entry in ("serial", "dygraph"):
        plan = None
        loader = [[paddle.to_tensor(v) for v in batch.values()] for batch in batches]
        if entry == "dygraph":
            plan = rbt.tune(model, input_spec=spec, search_space=space)
            plan.shard_layer(model)
            loader = plan.shard_dataloader(loader)
        optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
        losses = []
        for batch in loader:
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(float(loss.numpy()))
        return {"plan": plan and plan.to_dict(), "losses": losses}

    network = Logits(model)
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=network.parameters())
    if entry == "to_static":
        strategy = dist.Strategy({"tuning": tuning})
        engine = dist.to_static(network, None, model.criterion, optimizer, strategy, input_spec=[spec[:3], spec[3:]])
        engine.train()
        plan = rbt.engine_plan(engine)
        losses = [float(engine(*batch)) for batch in plan.shard_dataloader([list(b.values()) for b in batches])]
        return {"plan": plan.to_dict(), "losses": losses}

    if entry == "engine-dict":
        strategy = auto.Strategy({"tuning": tuning})
    else:
        strategy = auto.Strategy()
        for name, value in tuning.items():
            setattr(strategy.tuning, name, value)
    if entry == "engine-merge":
        strategy.gradient_merge.enable, strategy.gradient_merge.k_steps, strategy.gradient_merge.avg = True, 2, True
    if entry == "engine-amp":
        strategy.amp.enable, strategy.amp.dtype, strategy.amp.level = True, "bfloat16", "O1"
    engine = auto.Engine(network, model.criterion, optimizer, strategy=strategy)
    if entry == "engine-run":
        engine.prepare(spec[:3], spec[3:], mode="train")
        plan = rbt.engine_plan(engine)
        rows = BATCH // plan.degrees["dp"]
        part = plan.stages[0].process_mesh.coordinate(dist.get_rank(), "dp")
        feeds = [{k: v[part * rows : (part + 1) * rows] for k, v in batch.items()} for batch in batches]
        return {"plan": plan.to_dict(), "losses": [float(engine.run(feed)["loss"]) for feed in feeds]}
    recorded = Losses()
    engine.fit(Samples(batches), batch_size=BATCH, epochs=1, verbose=0, callbacks=[recorded])
    recomputed = sum(op.has_attr("bwd_recompute_id") for op in engine.main_program.global_block().ops)
    evaluated = engine.evaluate(Samples(batches), batch_size=BATCH, verbose=0)["loss"]
    plan = rbt.engine_plan(engine).to_dict()
    return {"plan": plan, "losses": recorded.losses, "evaluated": float(evaluated), "recomputed_ops": recomputed}


if __name__ == "__main__":
    paddle.set_device("cpu")
    entry, space, steps, out = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    if "PADDLE_TRAINER_ID" in os.environ:
        dist.init_parallel_env()
    result = run(entry, space, steps)
    if dist.get_rank() == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(result, file)
