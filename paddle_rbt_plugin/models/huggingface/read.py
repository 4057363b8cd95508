"""From a ``config.json`` to a config of this package, whatever the family."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paddle_rbt_plugin.errors import ModelError
from paddle_rbt_plugin.models.huggingface import bert, dense, gemma, gpt2, sparse, t5
from paddle_rbt_plugin.models.huggingface.fields import Fields, ModelWarning
from paddle_rbt_plugin.models.transformer import DecoderConfig, EncoderConfig, EncoderDecoderConfig
from paddle_rbt_plugin.validation import shown

AnyConfig = DecoderConfig | EncoderConfig | EncoderDecoderConfig

FAMILIES: Mapping[str, Callable[[Fields, int], AnyConfig]] = {
    "bert": bert.bert,
    "deepseek_v2": sparse.deepseek_v2,
    "deepseek_v3": sparse.deepseek_v3,
    "ernie4_5": dense.ernie4_5,
    "ernie4_5_moe": sparse.ernie4_5_moe,
    "gemma": gemma.gemma,
    "gemma2": gemma.gemma2,
    "gemma3": gemma.gemma3,
    "gemma3_text": gemma.gemma3,
    "glm4": dense.glm4,
    "glm4_moe": sparse.glm4_moe,
    "gpt2": gpt2.gpt2,
    "gpt_oss": sparse.gpt_oss,
    "llama": dense.llama,
    "mistral": dense.mistral,
    "mixtral": sparse.mixtral,
    "phi3": dense.phi3,
    "qwen2": dense.qwen2,
    "qwen2_moe": sparse.qwen2_moe,
    "qwen3": dense.qwen3,
    "qwen3_moe": sparse.qwen3_moe,
    "t5": t5.t5,
}
"""By ``model_type``: makes the config for sequences of a length."""

_USUAL_SEQ = 4096
"""Tokens of a training sequence where nobody says it and the model can read as many: what most of these models were trained
with before their context was made longer (DeepSeek-V3: arXiv 2412.19437, section 4.2; Qwen3: arXiv 2505.09388, section 3.2)."""
_LENGTHS = ("max_position_embeddings", "n_positions")


def load_huggingface(path: str | Path, seq: int | None = None) -> AnyConfig:
    """The model that a ``config.json`` describes, for training with ``seq`` tokens.

    Raises ModelError if the file cannot be read, its family is unknown, or a field is missing, unknown or not supported."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read the model config {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: a model config is an object of fields, not {type(content).__name__}")
    try:
        return read_huggingface(content, seq=seq)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def is_huggingface(path: str | Path) -> bool:
    """Whether a file is a JSON object that could be a ``config.json``, unlike a saved program."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and ("model_type" in content or "architectures" in content or "hidden_size" in content)


def read_huggingface(values: Mapping[str, Any], seq: int | None = None, source: str = "") -> AnyConfig:
    """The model with these fields of a ``config.json``. Without ``seq`` a length is assumed, with a ModelWarning."""
    family = values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelError(f"model_type {shown(family)} is no family that is supported; supported: {', '.join(FAMILIES)}")
    fields = Fields(family, values)
    if family == "gemma3" and "text_config" in values:
        fields = gemma.language_model(fields)
    fields.ignore(*_LENGTHS)
    config = FAMILIES[family](fields, seq if seq is not None else _assumed_seq(fields))
    fields.check_rest()
    return dataclasses.replace(config, source=source) if source else config


def _assumed_seq(fields: Fields) -> int:
    longest = [fields.size(name) for name in _LENGTHS if fields.values.get(name) is not None]
    seq = min([_USUAL_SEQ, *longest])
    warnings.warn(
        f"a config.json does not say how long sequences of training are; {seq} tokens are assumed, --seq says others",
        ModelWarning,
        stacklevel=3,
    )
    return seq
