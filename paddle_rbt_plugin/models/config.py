"""What a GPT or a LLaMA is made of, and the published models by name.

A config is a frozen dataclass; every named one is a YAML file in ``configs/`` that says where its numbers come from, and a
user's own file of the same form loads with ``load_config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

import yaml
from pydantic import Strict

from paddle_rbt_plugin.cluster.strict import load_yaml
from paddle_rbt_plugin.errors import ModelError
from paddle_rbt_plugin.validation import Kind, check_fields, check_known, nearest, number, whole

CONFIGS = Path(__file__).parent / "configs"
MAX_LAYERS = 2**10
MAX_SIZE = 2**24
"""Of every other size: far beyond any model."""
MAX_ELEMENTS = 2**56
"""Of one tensor: the bytes of several of them still fit 64 bits."""

_SIZE = whole(1, MAX_SIZE)
_RATE = number("of at least 0 and less than 1", ge=0, lt=1)
_SMALL = number("above 0 and less than 1", gt=0, lt=1)
_STD = number("above 0, and finite", gt=0)
_BASE = number("above 1, and finite", gt=1)
_FLOATS = ("dropout", "norm_eps", "init_std", "rope_theta")


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """What every model is made of. Raises ModelError, which names the field and what it can be, for values that make none."""

    arch: ClassVar[str]

    layers: Annotated[int, whole(1, MAX_LAYERS)]
    hidden: Annotated[int, _SIZE]
    ffn: Annotated[int, _SIZE]
    """Width of the feed-forward network, of its gate and up projections where it has those."""
    heads: Annotated[int, _SIZE]
    vocab: Annotated[int, _SIZE]
    """Size of the vocabulary with any padding."""
    seq: Annotated[int, _SIZE]
    """Tokens of a training sequence."""
    norm_eps: Annotated[float, _SMALL] = 1e-5
    init_std: Annotated[float, _STD] = 0.02
    """Standard deviation of the initial weights (arXiv 2005.14165 follows GPT-2)."""
    source: Annotated[str, Kind("text", Annotated[str, Strict()])] = ""
    """Where the numbers come from."""

    def __post_init__(self) -> None:
        check_fields(self, ModelError)
        _check_divides(self, "hidden", "heads")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True, kw_only=True)
class GPTConfig(Decoder):
    """Decoder of GPT-2 and GPT-3: layer norm before each half, as many learned positions as ``seq``, biases, head tied to the
    embedding."""

    arch = "gpt"

    dropout: Annotated[float, _RATE] = 0.0
    """Probability of dropping an element of the embedding, the attention weights and the output of each half."""

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values: all of them."""
        return self.heads


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(Decoder):
    """Decoder of LLaMA: RMSNorm before each half, rotary positions, grouped keys and values, SwiGLU, no biases, own head."""

    arch = "llama"

    kv_heads: Annotated[int, _SIZE]
    """Heads of keys and values; each serves ``heads / kv_heads`` query heads (arXiv 2305.13245)."""
    rope_theta: Annotated[float, _BASE] = 10000.0
    """Base of the rotary frequencies (arXiv 2104.09864, section 3.2.2)."""
    norm_eps: Annotated[float, _SMALL] = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_divides(self, "heads", "kv_heads")
        if self.head_dim % 2:
            raise ModelError(f"hidden / heads must be even for rotary positions, not {self.hidden} / {self.heads}")


Config = GPTConfig | LlamaConfig

ARCHITECTURES: Mapping[str, type[GPTConfig] | type[LlamaConfig]] = {c.arch: c for c in (GPTConfig, LlamaConfig)}


def config_names() -> tuple[str, ...]:
    """Names that ``named_config`` knows, sorted."""
    return tuple(sorted(p.stem for p in CONFIGS.glob("*.yaml")))


def named_config(name: str) -> Config:
    """The published model of that name, for example ``gpt3-1.3b``. Raises ModelError for an unknown name."""
    if name not in config_names():
        raise ModelError(f"no model is named {name!r}; {nearest(name, config_names())}")
    return load_config(CONFIGS / f"{name}.yaml")


def check_batch(config: Config, batch: int) -> None:
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


def load_config(path: str | Path) -> Config:
    """The model that a YAML file describes: ``arch`` (gpt or llama) and the fields of its config.

    Raises ModelError if the file cannot be read, or a field is missing, unknown or of no use."""
    try:
        content = load_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ModelError(f"cannot read the model config {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: a model config is a mapping of fields, not {type(content).__name__}")
    try:
        return _from_fields(content)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def _from_fields(content: Mapping[str, Any]) -> Config:
    values = dict(content)
    arch = values.pop("arch", None)
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise ModelError(f"arch must be one of {', '.join(ARCHITECTURES)}, not {arch!r}")
    config_type = ARCHITECTURES[arch]
    known = {f.name: f for f in fields(config_type)}
    check_known(f"{arch} has no field", values, known, ModelError)
    missing = [n for n, f in known.items() if f.default is MISSING and n not in values]
    if missing:
        raise ModelError(f"{arch} also needs {', '.join(missing)}")
    for name, value in values.items():
        if name in _FLOATS and isinstance(value, str):  # as YAML 1.1 reads 1e-5
            values[name] = _number_of(value)
    return config_type(**values)


def _number_of(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # refused with what would be right


def _check_divides(config: Decoder, whole: str, part: str) -> None:
    total, count = getattr(config, whole), getattr(config, part)
    if total % count:
        divisors = [d for d in range(1, total + 1) if total % d == 0]
        near = sorted(sorted(divisors, key=lambda d: abs(d - count))[:4])
        raise ModelError(f"{part} must divide {whole}, but {whole} = {total} and {part} = {count}; near it: {near}")
