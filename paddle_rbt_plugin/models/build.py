"""From a config to a Layer, the shapes of its inputs, and data to train it on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from paddle import nn
from paddle.static import InputSpec

from paddle_rbt_plugin.errors import ModelError
from paddle_rbt_plugin.models.config import Config, GPTConfig
from paddle_rbt_plugin.models.decoder import DecoderForPretraining
from paddle_rbt_plugin.models.encoder import EncoderForPretraining
from paddle_rbt_plugin.models.encoder_decoder import EncoderDecoderForPretraining
from paddle_rbt_plugin.models.gpt import GPTForPretraining
from paddle_rbt_plugin.models.llama import LlamaForPretraining
from paddle_rbt_plugin.models.sizes import MAX_ELEMENTS
from paddle_rbt_plugin.models.transformer import DecoderConfig, EncoderConfig, EncoderDecoderConfig


def build(config: Config) -> nn.Layer:
    """The model as a Layer whose ``forward`` takes the tensors of ``input_spec`` and returns the loss.

    Under ``paddle.LazyGuard()`` nothing is allocated, whatever the size."""
    if isinstance(config, GPTConfig):
        return GPTForPretraining(config)
    if isinstance(config, DecoderConfig):
        return DecoderForPretraining(config)
    if isinstance(config, EncoderConfig):
        return EncoderForPretraining(config)
    if isinstance(config, EncoderDecoderConfig):
        return EncoderDecoderForPretraining(config)
    return LlamaForPretraining(config)


def input_spec(config: Config, batch: int) -> list[InputSpec]:
    """Shapes and dtypes of the arguments of ``forward``, in order and with their names, for ``batch`` sequences.

    Raises ModelError for more of them than can be counted with."""
    _check_batch(config, batch)
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
        "attention_mask": 1 if isinstance(config, EncoderConfig) else np.where(positions[:, None] >= positions, 0.0, -1e9),
        "labels": sequence[:, 1:],
        "loss_mask": 1.0,
        "token_type_ids": positions >= config.seq // 2,
        "next_sentence_label": 0,
        "decoder_input_ids": sequence[:, :-1],
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
    if isinstance(config, EncoderConfig):
        names = ("input_ids", "token_type_ids", "attention_mask", "labels")
        return {**dict.fromkeys(names, (tokens, "int64")), "next_sentence_label": ([batch, 1], "int64")}
    if isinstance(config, EncoderDecoderConfig):
        return dict.fromkeys(("input_ids", "decoder_input_ids", "labels"), (tokens, "int64"))
    return {"input_ids": (tokens, "int64"), "labels": (tokens, "int64")}


def _check_batch(config: Config, batch: int) -> None:
    """Raises ModelError for a batch that makes tensors of more than ``MAX_ELEMENTS``."""
    largest = {
        "batch x heads x seq x seq": batch * config.heads * config.seq**2,
        "batch x seq x ffn": batch * config.seq * config.ffn,
        "batch x seq x vocab": batch * config.seq * config.vocab,
    }
    for sizes, elements in largest.items():
        if elements > MAX_ELEMENTS:
            raise ModelError(
                f"a tensor of {sizes} = {elements} elements is larger than can be counted with: batch {batch}, heads "
                f"{config.heads}, seq {config.seq}, ffn {config.ffn}, vocab {config.vocab}"
            )
