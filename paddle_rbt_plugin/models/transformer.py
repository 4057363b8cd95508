"""What transformers are made of: one config for each part, and one for each way to put the parts together.

A family of published models is a choice among these parts; ``models.huggingface`` makes it from a ``config.json``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import InstanceOf

from paddle_rbt_plugin.errors import ModelError
from paddle_rbt_plugin.models.sizes import BASE, COUNT, LAYERS, RATE, SIZE, SMALL, STD, SWITCH, TEXT
from paddle_rbt_plugin.validation import Kind, check_fields, number, one_of

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "clamped_swish")
"""Of feed-forward networks. ``clamped_swish`` is GPT-OSS's: gate sigmoid(1.702 gate) (up + 1), both of them clamped to 7."""
_SCALE = number("above 0, and finite", gt=0)
_CAP = number("of at least 0, and finite", ge=0)
_SHARE = number("above 0 and at most 1", gt=0, le=1)


class Part:
    """A part whose fields are checked. Raises ModelError, which names the field and what it can be."""

    def __post_init__(self) -> None:
        check_fields(self, ModelError)


@dataclass(frozen=True, kw_only=True)
class Heads(Part):
    """Attention with heads of queries that share heads of keys and values (arXiv 2305.13245)."""

    heads: Annotated[int, SIZE]
    kv_heads: Annotated[int, SIZE]
    head_dim: Annotated[int, SIZE]
    qkv_bias: Annotated[bool, SWITCH] = False
    out_bias: Annotated[bool, SWITCH] = False
    qk_norm: Annotated[bool, SWITCH] = False
    """An RMSNorm of every head of queries and keys, with one scale for all heads."""
    sinks: Annotated[bool, SWITCH] = False
    """A learned score per head that takes part in the softmax and reads no value (GPT-OSS, arXiv 2508.10925)."""
    scaling: Annotated[float | None, _SCALE.or_none()] = None
    """Of the scores; 1 / sqrt(head_dim) unless given."""
    softcap: Annotated[float, _CAP] = 0.0
    """Scores become softcap tanh(scores / softcap) (Gemma 2, arXiv 2408.00118); 0 leaves them."""
    rotary_share: Annotated[float, _SHARE] = 1.0
    """Share of a head that rotary positions turn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise ModelError(
                f"the heads of keys and values must divide those of queries, but there are {self.kv_heads} and {self.heads}"
            )

    @property
    def scale(self) -> float:
        return float(self.scaling or self.head_dim**-0.5)

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_share)


@dataclass(frozen=True, kw_only=True)
class Latent(Part):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values come from a narrow vector, and
    the rotated part of the key is shared by all heads."""

    heads: Annotated[int, SIZE]
    query_rank: Annotated[int, COUNT]
    """Width of the vector that queries come from; 0 where they are projected from the hidden state."""
    kv_rank: Annotated[int, SIZE]
    plain_dim: Annotated[int, SIZE]
    """Of queries and keys of a head: what is not rotated."""
    rotary_dim: Annotated[int, SIZE]
    value_dim: Annotated[int, SIZE]
    bias: Annotated[bool, SWITCH] = False
    """Of the projections to the narrow vectors, and of the output."""

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def head_dim(self) -> int:
        return self.plain_dim + self.rotary_dim


@dataclass(frozen=True, kw_only=True)
class FeedForward(Part):
    """Feed-forward network: act(x W1) W2, or gated (arXiv 2002.05202)."""

    width: Annotated[int, SIZE]
    activation: Annotated[str, one_of(*ACTIVATIONS)]
    gated: Annotated[bool, SWITCH] = True
    bias: Annotated[bool, SWITCH] = False


@dataclass(frozen=True, kw_only=True)
class Experts(Part):
    """Mixture of experts: a router chooses a few gated feed-forward networks for each token."""

    count: Annotated[int, SIZE]
    chosen: Annotated[int, SIZE]
    """Experts per token."""
    width: Annotated[int, SIZE]
    """Of one expert."""
    activation: Annotated[str, one_of(*ACTIVATIONS)]
    bias: Annotated[bool, SWITCH] = False
    shared_width: Annotated[int, COUNT] = 0
    """Of a gated feed-forward network that every token passes as well; all shared experts side by side make one."""
    shared_gate: Annotated[bool, SWITCH] = False
    """The shared expert's output is multiplied by sigmoid(x w) (Qwen1.5-MoE)."""
    scores: Annotated[str, one_of("softmax", "sigmoid")] = "softmax"
    renormalise: Annotated[bool, SWITCH] = True
    """The weights of the chosen ones sum to one."""
    scaling: Annotated[float, _SCALE] = 1.0
    """Of the sum of the chosen experts."""
    router_bias: Annotated[bool, SWITCH] = False
    balanced: Annotated[bool, SWITCH] = False
    """A bias per expert takes part in the choice only; no gradient changes it (arXiv 2408.15664)."""
    first: Annotated[int, COUNT] = 0
    """Number of layers before the first one with experts."""
    every: Annotated[int, SIZE] = 1
    """From there on, the layers whose number, counted from 1, this divides."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chosen > self.count:
            raise ModelError(f"a token can be sent to at most {self.count} experts, as many as there are, not {self.chosen}")

    def in_layer(self, layer: int) -> bool:
        """Whether layer number ``layer``, counted from 0, has experts."""
        return layer >= self.first and (layer + 1) % self.every == 0


@dataclass(frozen=True, kw_only=True)
class Norm(Part):
    """Normalisation of the hidden state."""

    kind: Annotated[str, one_of("rms", "layer")] = "rms"
    eps: Annotated[float, SMALL] = 1e-6
    plus_one: Annotated[bool, SWITCH] = False
    """The scale is 1 + weight (Gemma)."""


@dataclass(frozen=True, kw_only=True)
class Transformer(Part):
    """What every transformer here is made of."""

    arch: Annotated[str, TEXT]
    """The family, as Hugging Face names it (``model_type``)."""
    layers: Annotated[int, LAYERS]
    hidden: Annotated[int, SIZE]
    vocab: Annotated[int, SIZE]
    """Size of the vocabulary with any padding."""
    seq: Annotated[int, SIZE]
    """Tokens of a training sequence."""
    attention: Annotated[Heads | Latent, Kind("Heads or Latent", InstanceOf[Heads] | InstanceOf[Latent])]
    ffn_part: Annotated[FeedForward, Kind("FeedForward", InstanceOf[FeedForward])]
    norm: Annotated[Norm, Kind("Norm", InstanceOf[Norm])]
    positions: Annotated[int, COUNT] = 0
    """Learned positions, which a sequence cannot exceed; 0 where there are none."""
    tied: Annotated[bool, SWITCH] = True
    """The head has the weight of the word embedding."""
    dropout: Annotated[float, RATE] = 0.0
    attention_dropout: Annotated[float, RATE] = 0.0
    init_std: Annotated[float, STD] = 0.02
    source: Annotated[str, TEXT] = ""
    """Where the numbers come from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions and self.seq > self.positions:
            raise ModelError(f"seq must be at most {self.positions}, the positions that the model has learned, not {self.seq}")

    @property
    def heads(self) -> int:
        return self.attention.heads

    @property
    def kv_heads(self) -> int:
        return self.attention.kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def ffn(self) -> int:
        """Width of the widest feed-forward network."""
        return self.ffn_part.width


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Transformer):
    """A decoder that predicts the next token."""

    experts: Annotated[Experts | None, Kind("Experts", InstanceOf[Experts]).or_none()] = None
    """In place of the feed-forward network, in the layers that it says."""
    windows: tuple[int, ...] = (0,)
    """How many tokens back attention reads, the current one included, layer by layer and then from the start again; 0 is no
    limit."""
    rope_theta: Annotated[float, BASE] = 10000.0
    """Base of the rotary frequencies (arXiv 2104.09864, section 3.2.2)."""
    window_rope_theta: Annotated[float | None, BASE.or_none()] = None
    """That of layers with a window, where it differs."""
    norm_after: Annotated[bool, SWITCH] = False
    """What a half of a block adds to its input is normalised, too (Gemma 2, GLM-4)."""
    embedding_scale: Annotated[float, _SCALE] = 1.0
    logit_scale: Annotated[float, _SCALE] = 1.0
    logit_softcap: Annotated[float, _CAP] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.windows or any(not isinstance(w, int) or w < 0 for w in self.windows):
            raise ModelError(f"windows must be whole numbers of at least 0, not {self.windows!r}")
        turned = self.attention.rotary_dim
        if not self.positions and (turned % 2 or not turned):
            raise ModelError(f"rotary positions turn pairs: their part of a head must be even and above 0, not {turned}")

    @property
    def ffn(self) -> int:
        return max(self.ffn_part.width, self.experts.width if self.experts else 0)

    def window(self, layer: int) -> int:
        """The window of layer number ``layer``; 0 where it covers the whole sequence."""
        window = self.windows[layer % len(self.windows)]
        return window if window < self.seq else 0

    def kinds(self) -> tuple[tuple[int, bool], ...]:
        """Of every layer its window and whether it has experts: layers of one kind are alike."""
        experts = self.experts
        return tuple((self.window(i), experts is not None and experts.in_layer(i)) for i in range(self.layers))


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(Transformer):
    """An encoder that predicts masked tokens, and whether two sentences follow each other (BERT, arXiv 1810.04805)."""

    attention: Annotated[Heads, Kind("Heads", InstanceOf[Heads])]
    token_types: Annotated[int, SIZE] = 2


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(Transformer):
    """An encoder, and a decoder that reads its result (T5, arXiv 1910.10683). Both sequences are ``seq`` long."""

    attention: Annotated[Heads, Kind("Heads", InstanceOf[Heads])]
    decoder_layers: Annotated[int, LAYERS]
    buckets: Annotated[int, SIZE] = 32
    """Distances that have a learned score of their own, one per head."""
    max_distance: Annotated[int, SIZE] = 128


def period(kinds: Sequence[object]) -> tuple[int, int]:
    """How layers repeat: how many come first, and how many make a round of those that follow, the last one perhaps cut short.
    As few as can be, all together."""
    count = len(kinds)
    found = [(s + p, s, p) for s in range(count) for p in range(1, count - s + 1) if _repeats(kinds[s:], p)]
    _, start, length = min(found)
    return start, length


def _repeats(kinds: Sequence[object], length: int) -> bool:
    return all(kinds[i] == kinds[i - length] for i in range(length, len(kinds)))
