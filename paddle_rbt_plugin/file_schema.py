"""Validates files that people may have edited (plans, results and cases of the benchmark suite) against their JSON schemas.

Numbers are checked more strictly than JSON Schema does: integers must fit 64 bits, and all numbers must be finite.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib.resources import files
from typing import Any

import jsonschema


def problem(package: str, schema: str, data: Any) -> str:
    """``where: what`` for the first violation of a package's schema in ``data``; empty if there is none."""
    for error in _validator(package, schema).iter_errors(data):
        where = "/".join(map(str, error.absolute_path)) or "the whole file"
        beyond = error.validator == "type" and _is_number(error.instance) and not _is_finite(error.instance)
        return f"{where}: {'the number is too large, or none' if beyond else error.message[:200]}"
    return ""


def unprintable(value: Any, where: str = "") -> str:
    """Where ``value`` contains text that cannot be printed as it is (control characters, lone surrogates); empty if nowhere."""
    if isinstance(value, dict):
        found = (unprintable(key, where) or unprintable(item, f"{where}/{key}") for key, item in value.items())
        return next(filter(None, found), "")
    if isinstance(value, list):
        return next(filter(None, (unprintable(item, f"{where}/{i}") for i, item in enumerate(value))), "")
    if isinstance(value, str) and any(_breaks_terminals(ord(c)) and c not in "\n\t" for c in value):
        return ascii(where.lstrip("/") or "a key")
    return ""


def no_constant(name: str) -> None:
    """For ``json.loads(parse_constant=...)``: rejects NaN and Infinity, which Python accepts but JSON does not."""
    raise ValueError(f"{name} is no number of JSON")


def _breaks_terminals(code: int) -> bool:
    return code < 32 or 127 <= code < 160 or 0xD800 <= code < 0xE000


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return abs(value) <= (2**63 - 1 if isinstance(value, int) else sys.float_info.max)


def _number(_: Any, value: Any) -> bool:
    return _is_number(value) and _is_finite(value)


def _integer(_: Any, value: Any) -> bool:
    return isinstance(value, int) and _number(_, value)


_Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many({"number": _number, "integer": _integer}),
)


@cache
def _validator(package: str, schema: str) -> Any:
    return _Validator(json.loads((files(package) / schema).read_text(encoding="utf-8")))
