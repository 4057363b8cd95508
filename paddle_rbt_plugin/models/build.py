"""From a config to a Layer, the shapes of its inputs, and data to train it on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from paddle import nn
from paddle.static import InputSpec

from paddle_rbt_plugin.models.config import Config, GPTConfig, check_batch
from paddle_rbt_plugin.models.gpt import GPTForPretraining
from paddle_rbt_plugin.models.llama import LlamaForPretraining


def build(config: Config) -> nn.Layer:
    """The model as a Layer whose ``forward`` takes the tensors of ``input_spec`` and returns the loss.

    Under ``paddle.LazyGuard()`` nothing is allocated, whatever the size."""
    return GPTForPretraining(config) if isinstance(config, GPTConfig) else LlamaForPretraining(config)


def input_spec(config: Config, batch: int) -> list[InputSpec]:
    """Shapes and dtypes of the arguments of ``forward``, in order and with their names, for ``batch`` sequences.

    Raises ModelError for more of them than can be counted with."""
    check_batch(config, batch)
    return [InputSpec(shape, dtype, name) for name, (shape, dtype) in _inputs(config, batch).items()]


def sample_batch(config: Config, batch: int, seed: int) -> dict[str, np.ndarray]:
    """Arguments of ``forward`` by name, in order: sequences that count upwards from a random token by a random step, so
    that there is something to learn. The same for the same seed."""
    random = np.random.default_rng(seed)
    start = random.integers(0, config.vocab, (batch, 1))
    step = random.integers(1, 4, (batch, 1))
    sequence = (start + step * np.arange(config.seq + 1)) % config.vocab
    positions = np.arange(config.seq)
    values: dict[str, npt.ArrayLike] = {
        "tokens": sequence[:, :-1],
        "input_ids": sequence[:, :-1],
        "position_ids": positions,
        "attention_mask": np.where(positions[:, None] >= positions, 0.0, -1e9),
        "labels": sequence[:, 1:],
        "loss_mask": 1.0,
    }
    return {
        name: np.ascontiguousarray(np.broadcast_to(values[name], shape), dtype=dtype)
        for name, (shape, dtype) in _inputs(config, batch).items()
    }


def _inputs(config: Config, batch: int) -> dict[str, tuple[list[int], str]]:
    tokens = [batch, config.seq]
    if isinstance(config, GPTConfig):
        return {
            "tokens": (tokens, "int64"),
            "position_ids": (tokens, "int64"),
            "attention_mask": ([batch, 1, config.seq, config.seq], "float32"),
            "labels": (tokens, "int64"),
            "loss_mask": (tokens, "float32"),
        }
    return {"input_ids": (tokens, "int64"), "labels": (tokens, "int64")}
