"""What the demo trains, and the three ways in which it does: alone, as a static program, in dygraph.

``paddle.distributed.launch`` runs this module in every process of the demo. Model, data and initial weights depend on nothing
but the seed, so each way should give the losses of every other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.static import InputSpec

from paddle_rbt_plugin.config import PASS_NAME
from paddle_rbt_plugin.models import GPTConfig, input_spec, sample_batch
from paddle_rbt_plugin.models.gpt import GPTCriterion, GPTModel
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.processes import work

CONFIG = GPTConfig(layers=2, hidden=64, ffn=256, heads=8, vocab=128, seq=32)
BATCH = 16
LEARNING_RATE = 1e-3
SEED = 2024
_INPUTS = 3
"""Of the arguments of a GPT the first three are inputs, the others labels."""


class GPT(nn.Layer):
    """Decoder and head; the loss is apart, as ``dist.to_static`` wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPTModel(CONFIG)

    def forward(self, tokens: paddle.Tensor, position_ids: paddle.Tensor, attention_mask: paddle.Tensor) -> paddle.Tensor:
        """Logits [batch, seq, vocab]."""
        hidden = self.gpt(tokens, position_ids, attention_mask)
        return paddle.matmul(hidden, self.gpt.word_embeddings.weight, transpose_y=True)


def specs() -> tuple[list[InputSpec], list[InputSpec]]:
    """Inputs and labels of the whole batch."""
    every = input_spec(CONFIG, BATCH)
    return every[:_INPUTS], every[_INPUTS:]


def batches(steps: int) -> Iterator[list[paddle.Tensor]]:
    """One whole batch per step, inputs and labels in order."""
    for step in range(steps):
        yield [paddle.to_tensor(value) for value in sample_batch(CONFIG, BATCH, SEED + step).values()]


def train_serial(steps: int) -> Iterator[float]:
    """Loss of every step of one process that knows nothing of any plan."""
    model = _model()
    yield from _train(model, batches(steps))


def train_dygraph(steps: int, plan: Plan) -> Iterator[float]:
    """The same with distributed parameters and batches, each op finding its placements as it runs."""
    model = plan.shard_layer(_model())
    yield from _train(model, plan.shard_dataloader(batches(steps)))


def train_static(steps: int, plan: Plan, path: str) -> Iterator[float]:
    """The same through ``dist.to_static``, whose program the pass of this package annotates with the plan saved at ``path``."""
    model = _model()
    strategy = dist.Strategy()
    strategy.tuning.enable = True
    strategy.tuning.pass_name = PASS_NAME
    strategy.tuning.cluster = f"1x{dist.get_world_size()}:CPU"
    strategy.tuning.load_path = path
    trained = dist.to_static(model, None, GPTCriterion(), _optimizer(model), strategy, input_spec=specs())
    trained.train()
    for batch in plan.shard_dataloader(batches(steps)):
        yield float(trained(*batch))


def _model() -> GPT:
    paddle.seed(SEED)
    return GPT()


def _optimizer(model: nn.Layer) -> paddle.optimizer.Optimizer:
    return paddle.optimizer.AdamW(LEARNING_RATE, parameters=model.parameters())


def _train(model: nn.Layer, loader: Iterable[list[paddle.Tensor]]) -> Iterator[float]:
    optimizer, criterion = _optimizer(model), GPTCriterion()
    for batch in loader:
        loss = criterion(model(*batch[:_INPUTS]), *batch[_INPUTS:])
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        yield float(dist.unshard_dtensor(loss) if loss.is_dist() else loss)


def losses(directory: str, way: str, steps: str) -> Iterator[float]:
    """Loss of every step of one process of the demo, trained in the given way under ``plan.json`` of the directory."""
    path = Path(directory, "plan.json")
    train = train_dygraph if way == "dygraph" else partial(train_static, path=str(path))
    yield from train(int(steps), Plan.load(path))


if __name__ == "__main__":
    work(sys.argv[1], losses(*sys.argv[1:]))
