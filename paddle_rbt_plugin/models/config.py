"""What a GPT or a LLaMA is made of, and the published models by name.

A config is a frozen dataclass; every named one is a YAML file in ``configs/`` that says where its numbers come from, and a
user's own file of the same form loads with ``load_config``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import yaml

from paddle_rbt_plugin.cluster.strict import load_yaml
from paddle_rbt_plugin.errors import ModelError

CONFIGS = Path(__file__).parent / "configs"
MAX_LAYERS = 2**10
MAX_SIZE = 2**24
"""Of every other size: far beyond any model."""
MAX_ELEMENTS = 2**56
"""Of one tensor: the bytes of several of them still fit 64 bits."""


Legal = tuple[str, Callable[[Any], bool]]
"""What a field can be, in words, and whether a value is that."""


def _whole(most: int) -> Legal:
    return f"a whole number from 1 to {most}", lambda x: _is_a(x, int) and 1 <= x <= most


def _number(words: str, test: Callable[[float], bool]) -> Legal:
    return f"a number {words}", lambda x: _is_a(x, int, float) and test(x)


def _is_a(value: Any, *types: type) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)  # which is an int to Python


LEGAL: Mapping[str, Legal] = {
    "layers": _whole(MAX_LAYERS),
    **dict.fromkeys(("hidden", "ffn", "heads", "kv_heads", "vocab", "seq"), _whole(MAX_SIZE)),
    "dropout": _number("of at least 0 and less than 1", lambda x: 0 <= x < 1),
    "norm_eps": _number("above 0 and less than 1", lambda x: 0 < x < 1),
    "init_std": _number("above 0, and finite", lambda x: 0 < x < math.inf),
    "rope_theta": _number("above 1, and finite", lambda x: 1 < x < math.inf),
    "source": ("text", lambda x: isinstance(x, str)),
}
"""Of every field of any config."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """What every model is made of. Raises ModelError, which names the field and what it can be, for values that make none."""

    arch: ClassVar[str]

    layers: int
    hidden: int
    ffn: int
    """Width of the feed-forward network, of its gate and up projections where it has those."""
    heads: int
    vocab: int
    """Size of the vocabulary with any padding."""
    seq: int
    """Tokens of a training sequence."""
    norm_eps: float = 1e-5
    init_std: float = 0.02
    """Standard deviation of the initial weights (arXiv 2005.14165 follows GPT-2)."""
    source: str = ""
    """Where the numbers come from."""

    def __post_init__(self) -> None:
        for f in fields(self):
            words, is_legal = LEGAL[f.name]
            value = getattr(self, f.name)
            if not is_legal(value):
                raise ModelError(f"{f.name} must be {words}, not {repr(value)[:40]}")
        _check_divides(self, "hidden", "heads")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True, kw_only=True)
class GPTConfig(Decoder):
    """Decoder of GPT-2 and GPT-3: layer norm before each half, as many learned positions as ``seq``, biases, head tied to the
    embedding."""

    arch = "gpt"

    dropout: float = 0.0
    """Probability of dropping an element of the embedding, the attention weights and the output of each half."""

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values: all of them."""
        return self.heads


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(Decoder):
    """Decoder of LLaMA: RMSNorm before each half, rotary positions, grouped keys and values, SwiGLU, no biases, own head."""

    arch = "llama"

    kv_heads: int
    """Heads of keys and values; each serves ``heads / kv_heads`` query heads (arXiv 2305.13245)."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies (arXiv 2104.09864, section 3.2.2)."""
    norm_eps: float = 1e-6

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
        raise ModelError(f"no model is named {name!r}; {_suggest(name, config_names())}")
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
    for name in values:
        if name not in known:
            raise ModelError(f"{arch} has no field {name!r}; {_suggest(str(name), known)}")
    missing = [n for n, f in known.items() if f.default is MISSING and n not in values]
    if missing:
        raise ModelError(f"{arch} also needs {', '.join(missing)}")
    for name, value in values.items():
        if known[name].type == "float" and isinstance(value, str):  # as YAML 1.1 reads 1e-5
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


def _suggest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"
