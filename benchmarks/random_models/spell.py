"""A case as a reader of Python would write it down."""

from __future__ import annotations

from typing import Any

from random_models.blocks import INPUTS
from random_models.grammar import Case, shapes


def spell_case(case: Case) -> str:
    """The model, its loss, the script and the layout, a line each."""
    batch = case["sizes"]["batch"]
    lines = []
    for i, (s, value) in enumerate(zip(case["model"], shapes(case), strict=True)):
        operands = [f"x{j}" for j in s["in"]]
        shown = {k: v for k, v in s["at"].items() if k == "words" or s["op"] not in INPUTS}
        arguments = ", ".join([*operands, *(f"{k}={v!r}" for k, v in shown.items())])
        operands += [f"times={s['times']}"] if "times" in s else []
        again = f"  # the {'table' if s['op'] == 'tied_head' else 'Layer'} of x{s['of']}" if "of" in s else ""
        lines.append(f"x{i} = {s['op']}({arguments}){again or f'  # {[batch, *value.shape]}'}")
    losses = [f"{o['loss']}(x{o['value']}, form={o['form']!r})" for o in case["outputs"]]
    lines.append(f"loss = {' + '.join(losses)}" + ("  # returned by forward" if case["returned"] else ""))
    script: dict[str, Any] = {k: v for k, v in case["script"].items() if v not in ("none", 0, 0.0)}
    lines.append("script: " + ", ".join(f"{k}={v}" for k, v in script.items()))
    lines.append(f"layout: {spell_layout(case)}, entry: {case['entry']}")
    return "\n".join(lines)


def spell_layout(case: Case) -> str:
    """``dp2``, ``mp4``, ``dp2 x mp2``."""
    return " x ".join(f"{axis}{n}" for axis, n in case["layout"].items() if n > 1) or "one process"
