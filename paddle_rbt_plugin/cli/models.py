"""``paddle-rbt models``."""

from __future__ import annotations

import warnings
from typing import Any

from paddle_rbt_plugin.cli.output import Output, make_table, titled
from paddle_rbt_plugin.models import ModelWarning, config_names, count_parameters, named_config


def list_models(output: Output) -> None:
    """Prints every named model with its parameters and sizes."""
    names = config_names()
    rows = []
    with output.progress("counting parameters") as report:
        for done, name in enumerate(names):
            report(done, len(names), name)
            rows.append(_row(name))
    table = make_table("name", *_COLUMNS, right=tuple(_COLUMNS), gap=2)
    for row in rows:
        table.add_row(row["name"], *(spell(row) for spell in _COLUMNS.values()))
    output.result({"models": rows}, titled("models that plan takes by name", table))


def _row(name: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ModelWarning)  # what a model lacks is said where it is planned
        config = named_config(name)
    parameters = count_parameters(config)
    return {
        "name": name,
        "arch": config.arch,
        "parameters": parameters.total,
        "active_parameters": parameters.active,
        "layers": config.layers,
        "hidden": config.hidden,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "vocab": config.vocab,
        "seq": config.seq,
        "source": config.source,
    }


def _spell_count(count: int) -> str:
    """``671 B``, ``7.62 B`` or ``494 M``: three digits."""
    size, unit = (count / 1e9, "B") if count >= 999.5e6 else (count / 1e6, "M")
    return f"{size:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f} {unit}"


_COLUMNS = {
    "parameters": lambda row: _spell_count(row["parameters"]),
    "active": lambda row: "" if row["active_parameters"] == row["parameters"] else _spell_count(row["active_parameters"]),
    "layers": lambda row: str(row["layers"]),
    "hidden": lambda row: str(row["hidden"]),
    "heads": lambda row: str(row["heads"]),
    "kv heads": lambda row: str(row["kv_heads"]),
    "seq": lambda row: str(row["seq"]),
}
"""Columns of the table, and how they are spelled: ``active`` are the parameters that one token uses, where not all are."""
