"""Models by name and by file.

Every named model is a YAML file in ``configs/`` that says where its numbers come from, and a user's own file of the same form
loads with ``load_config``. A file describes a model in one of two ways: by ``arch`` (gpt or llama) and the fields of that
config, or by ``huggingface``, the fields of the ``config.json`` that the model is published with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml

from paddle_rbt_plugin.cluster.strict import load_yaml
from paddle_rbt_plugin.errors import ModelError
from paddle_rbt_plugin.models.config import Config, GPTConfig, LlamaConfig
from paddle_rbt_plugin.models.huggingface import read_huggingface
from paddle_rbt_plugin.validation import check_known, nearest

CONFIGS = Path(__file__).parent / "configs"
ARCHITECTURES: Mapping[str, type[GPTConfig] | type[LlamaConfig]] = {c.arch: c for c in (GPTConfig, LlamaConfig)}
_FLOATS = ("dropout", "norm_eps", "init_std", "rope_theta")


def config_names() -> tuple[str, ...]:
    """Names that ``named_config`` knows, sorted."""
    return tuple(sorted(p.stem for p in CONFIGS.glob("*.yaml")))


def named_config(name: str) -> Config:
    """The published model of that name, for example ``gpt3-1.3b``. Raises ModelError for an unknown name."""
    if name not in config_names():
        raise ModelError(f"no model is named {name!r}; {nearest(name, config_names())}")
    return load_config(CONFIGS / f"{name}.yaml")


def load_config(path: str | Path) -> Config:
    """The model that a YAML file describes.

    Raises ModelError if the file cannot be read, or a field is missing, unknown or of no use."""
    try:
        content = load_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ModelError(f"cannot read the model config {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: a model config is a mapping of fields, not {type(content).__name__}")
    try:
        return _from_published(content) if "huggingface" in content else _from_fields(content)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def _from_published(content: Mapping[str, Any]) -> Config:
    check_known("a config with huggingface has no field", content, ("huggingface", "seq", "source"), ModelError)
    published = content["huggingface"]
    if not isinstance(published, dict):
        raise ModelError(f"huggingface must be the fields of a config.json, not {type(published).__name__}")
    return read_huggingface(published, seq=content.get("seq"), source=content.get("source", ""))


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
