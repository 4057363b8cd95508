"""Trains a GPT of one's own under the strategy that the tuner finds; four lines make the difference to a serial script.

On two CPU processes, or on the GPUs of a machine:

    python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo examples/train_gpt.py
    python -m paddle.distributed.launch --gpus 0,1,2,3 examples/train_gpt.py
"""

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet import auto
from paddle.nn import functional as F

from paddle_rbt_plugin import engine_plan

VOCAB, HIDDEN, HEADS, LAYERS, SEQ = 128, 64, 8, 2, 32


class Block(nn.Layer):
    def __init__(self):
        super().__init__()
        self.norms = nn.LayerList([nn.LayerNorm(HIDDEN) for _ in range(2)])
        self.qkv = nn.LayerList([nn.Linear(HIDDEN, HIDDEN) for _ in range(3)])
        self.out, self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x, mask):
        y = self.norms[0](x)
        q, k, v = (p(y).reshape([0, 0, HEADS, HIDDEN // HEADS]).transpose([0, 2, 1, 3]) for p in self.qkv)
        weights = F.softmax(paddle.matmul(q, k, transpose_y=True) * (HIDDEN // HEADS) ** -0.5 + mask)
        x = x + self.out(paddle.matmul(weights, v).transpose([0, 2, 1, 3]).reshape([0, 0, HIDDEN]))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Layer):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQ, HIDDEN)
        self.blocks = nn.LayerList([Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, tokens, position_ids, mask):
        x = self.words(tokens) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, mask)
        return paddle.matmul(self.norm(x), self.words.weight, transpose_y=True)


class Counting(paddle.io.Dataset):
    """Sequences that count upwards from any token."""

    def __len__(self):
        return 320

    def __getitem__(self, i):
        sequence, positions = (i + np.arange(SEQ + 1)) % VOCAB, np.arange(SEQ)
        mask = np.where(positions[:, None] >= positions, 0.0, -1e9).astype("float32")[None]
        return sequence[:-1], positions, mask, sequence[1:]


if not paddle.is_compiled_with_cuda():
    paddle.set_device("cpu")
dist.init_parallel_env()
paddle.seed(2024)
model = GPT()
optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())

strategy = auto.Strategy()
strategy.tuning.enable = True
strategy.tuning.pass_name = "rule_based_tuner"

engine = auto.Engine(model, nn.CrossEntropyLoss(), optimizer, strategy=strategy)
engine.fit(Counting(), train_sample_split=3, batch_size=16, log_freq=5)
if dist.get_rank() == 0:
    print(engine_plan(engine).explain())
