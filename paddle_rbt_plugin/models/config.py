"""What a GPT or a LLaMA is made of, and every kind of config there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from paddle_rbt_plugin.errors import ModelError
from paddle_rbt_plugin.models.sizes import BASE, LAYERS, RATE, SIZE, SMALL, STD, TEXT, check_divides
from paddle_rbt_plugin.models.transformer import DecoderConfig, EncoderConfig, EncoderDecoderConfig
from paddle_rbt_plugin.validation import check_fields


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """What every model is made of. Raises ModelError, which names the field and what it can be, for values that make none."""

    arch: ClassVar[str]

    layers: Annotated[int, LAYERS]
    hidden: Annotated[int, SIZE]
    ffn: Annotated[int, SIZE]
    """Width of the feed-forward network, of its gate and up projections where it has those."""
    heads: Annotated[int, SIZE]
    vocab: Annotated[int, SIZE]
    """Size of the vocabulary with any padding."""
    seq: Annotated[int, SIZE]
    """Tokens of a training sequence."""
    norm_eps: Annotated[float, SMALL] = 1e-5
    init_std: Annotated[float, STD] = 0.02
    """Standard deviation of the initial weights (arXiv 2005.14165 follows GPT-2)."""
    source: Annotated[str, TEXT] = ""
    """Where the numbers come from."""

    def __post_init__(self) -> None:
        check_fields(self, ModelError)
        check_divides(self, "hidden", "heads")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True, kw_only=True)
class GPTConfig(Decoder):
    """Decoder of GPT-2 and GPT-3: layer norm before each half, as many learned positions as ``seq``, biases, head tied to the
    embedding."""

    arch = "gpt"

    dropout: Annotated[float, RATE] = 0.0
    """Probability of dropping an element of the embedding, the attention weights and the output of each half."""

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values: all of them."""
        return self.heads


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(Decoder):
    """Decoder of LLaMA: RMSNorm before each half, rotary positions, grouped keys and values, SwiGLU, no biases, own head."""

    arch = "llama"

    kv_heads: Annotated[int, SIZE]
    """Heads of keys and values; each serves ``heads / kv_heads`` query heads (arXiv 2305.13245)."""
    rope_theta: Annotated[float, BASE] = 10000.0
    """Base of the rotary frequencies (arXiv 2104.09864, section 3.2.2)."""
    norm_eps: Annotated[float, SMALL] = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_divides(self, "heads", "kv_heads")
        if self.head_dim % 2:
            raise ModelError(f"hidden / heads must be even for rotary positions, not {self.hidden} / {self.heads}")


Config = GPTConfig | LlamaConfig | DecoderConfig | EncoderConfig | EncoderDecoderConfig
"""A model of this package: in its own words, or a transformer made of what other models have in common."""
