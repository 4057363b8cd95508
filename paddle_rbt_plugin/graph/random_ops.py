"""Which ops draw random numbers, and where each of them takes its random stream from.

An op that is replicated must draw alike on all ranks, and one whose result is sharded must draw something else for each shard.
How that is done depends on the op:

- Ops with a seed operand compute their numbers from it alone. Run again on the same seed, they draw the same.
- Ops with a stream attribute draw from the generator of that name.
- The others draw from the generator of the device. All ranks bring it to one state before a program runs, so these ops have to
  draw the whole tensor on every rank; their operands are replicated where Paddle would leave them sharded (``draws_whole``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SEED_OPERANDS: Mapping[str, str] = {"dropout": "seed_tensor", "fused_dropout_add": "seed_tensor"}
"""Ops that compute their numbers from a seed, and the operand that holds it."""

STREAM_ATTRIBUTES: Mapping[str, str] = {
    "flash_attn": "rng_name",
    "flash_attn_qkvpacked": "rng_name",
    "flash_attn_unpadded": "rng_name",
    "flash_attn_varlen_qkvpacked": "rng_name",
    "flashmask_attention": "rng_name",
}
"""Ops that draw from a generator of their choice, and the attribute that names it."""

DEVICE_OPS = frozenset(
    {"bernoulli", "binomial", "class_center_sample", "cudnn_lstm", "dirichlet", "exponential", "fractional_max_pool2d"}
    | {"fractional_max_pool3d", "fused_attention", "fused_bias_dropout_residual_layer_norm", "fused_feedforward", "gaussian"}
    | {"gaussian_inplace", "gumbel_softmax", "memory_efficient_attention", "multinomial", "poisson", "randint", "randperm"}
    | {"rnn", "rrelu", "standard_gamma", "top_p_sampling", "truncated_gaussian_random", "uniform", "uniform_inplace"}
    | {"uniform_random_batch_size_like"}
)
"""Ops that draw from the generator of the device."""

RANDOM_OPS = frozenset({*SEED_OPERANDS, *STREAM_ATTRIBUTES, *DEVICE_OPS})
"""Every op that draws random numbers, by its canonical name."""

SEED_OP = "seed"
"""The op that draws the seed of others from a named generator."""

_PROBABILITIES = ("p", "dropout", "dropout_p", "dropout_prob", "dropout_rate")
"""Attributes that are 0 where such an op draws none."""


def canonical(type_: str) -> str:
    """The name of an op without the mark of ops that work in place."""
    return type_.removesuffix("_")


def draws(type_: str, attrs: Mapping[str, Any]) -> bool:
    """Whether an op with these attributes draws random numbers."""
    if canonical(type_) not in RANDOM_OPS or attrs.get("is_test"):
        return False
    return not any(attrs.get(name) == 0 for name in _PROBABILITIES)


def draws_whole(type_: str, attrs: Mapping[str, Any]) -> bool:
    """Whether an op draws from the generator of the device, and so the whole of its tensor on every rank."""
    return canonical(type_) in DEVICE_OPS and draws(type_, attrs)


def draws_again_the_same(type_: str) -> bool:
    """Whether an op that draws random numbers draws the same ones when it runs again on the same operands."""
    return canonical(type_) in SEED_OPERANDS
