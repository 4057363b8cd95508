"""Reads YAML and JSON of users, and reports a key that occurs twice: the libraries would silently keep the last one."""

from __future__ import annotations

import json
from typing import Any

import yaml


def load_yaml(text: str) -> Any:
    """Plain values only. Raises YAMLError, ValueError or RecursionError."""
    return yaml.load(text, _StrictLoader)


def load_json(text: str) -> Any:
    """Raises ValueError or RecursionError."""
    return json.loads(text, object_pairs_hook=_no_repetition)


def _no_repetition(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} occurs twice in one mapping")
    return result


class _StrictLoader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        _no_repetition([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
        return node
