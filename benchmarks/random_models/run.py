"""One case from start to end: alone, under the tuner, compared."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from random_models.compare import Difference, compare, remove
from random_models.grammar import Case
from random_models.pool import Jobs

FAILURES = ("difference", "crash", "hang")


@dataclass(frozen=True)
class Outcome:
    """What became of a case: ``same``, ``refused``, ``difference``, ``crash`` or ``hang``; ``unstable`` where rounding explains
    the difference, and ``serial`` where one process cannot train it, which is a fault of this benchmark.

    ``kind`` tells failures of an outcome apart: what differs, type and message of an exception, the reason of a refusal, the
    latter without numbers and names. A crash keeps it while it is shrunk."""

    outcome: str
    kind: str = ""
    detail: str = ""
    sizes: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.outcome in FAILURES

    def same_failure(self, other: Outcome) -> bool:
        """Whether this is the failure of another case. What differs first may be loss or weights of the same cause."""
        if self.outcome != other.outcome:
            return False
        return self.outcome != "crash" or self.kind == other.kind


def run_case(jobs: Jobs, case: Case, limit: float) -> Outcome:
    """Runs a case; ``limit`` are the seconds after which a job hangs."""
    begin = time.monotonic()
    alone = jobs.job(1).run(case, limit)
    after = time.monotonic()
    if alone["outcome"] != "trained":
        answer = alone["ranks"][0] or {}
        detail = answer.get("traceback") or alone.get("log", "")
        return Outcome("serial", _kind(answer, detail), detail, seconds={"serial": after - begin})
    way = "dygraph" if case["entry"] == "dygraph" else "static"
    losses = alone["ranks"][0]["losses"]
    if not np.isfinite(losses).all():
        return Outcome("unstable", "the serial loss is not finite", str(losses), seconds={"serial": after - begin})
    together = jobs.job(case["layout"]["dp"] * case["layout"]["mp"], way).run(case, limit)
    seconds = {"serial": after - begin, "tuned": time.monotonic() - after}
    answers = [a for a in together["ranks"] if a]
    try:
        if together["outcome"] == "trained":
            found = compare(alone["ranks"][0], together["ranks"])
            sizes = {n: getattr(found, n) for n in ("loss", "weight", "state", "copies")}
            if not found.kind:
                return Outcome("same", "", found.where, sizes, seconds)
            noise = _noise(jobs, case, alone["ranks"][0], limit)
            kind = found.beyond(noise)
            where = f"{found.where}; rounding alone: loss {noise.loss:.0e}, weight {noise.weight:.0e}"
            return Outcome("difference" if kind else "unstable", kind, where, sizes, seconds)
        if together["outcome"] == "refused":
            said = answers[0]
            return Outcome(
                "refused",
                f"{said['type']}: {general(_of_layout(said['message'], case['layout']))}",
                said["message"],
                seconds=seconds,
            )
        if together["outcome"] == "hang":
            said = next((a for a in answers if a["outcome"] != "trained"), {})
            return Outcome("hang", said.get("type", ""), said.get("message", "") or together["log"], seconds=seconds)
        crashed = next((a for a in answers if a["outcome"] == "crash"), {})
        detail = crashed.get("traceback") or together["log"]
        return Outcome("crash", _kind(crashed, detail), detail, seconds=seconds)
    finally:
        remove([*alone["ranks"], *together["ranks"]])


def _noise(jobs: Jobs, case: Case, serial: dict[str, Any], limit: float) -> Difference:
    """The largest of the differences that rounding errors of the initial weights make to the serial run."""
    found = []
    for jitter in range(2):
        done = jobs.job(1).run({**case, "jitter": jitter}, limit)
        if done["outcome"] == "trained":
            found.append(compare(serial, done["ranks"]))
        remove(done["ranks"])
    return Difference(*(max((getattr(f, n) for f in found), default=0.0) for n in ("loss", "weight", "state")))


def _of_layout(message: str, layout: dict[str, int]) -> str:
    """What a NoFeasiblePlan says of the layout that the search space allows; the other ways are ruled out by that."""
    _, found, rest = message.partition(f"pp 1 x dp {layout['dp']} x mp {layout['mp']}: ")
    return rest.split("; pp ")[0] if found else message


def general(message: str) -> str:
    """A message without its names and numbers, to count those of one reason together."""
    message = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "..", message.splitlines()[0] if message else "")
    return re.sub(r"\b[\w.]*\d[\w.]*\b", "#", message)[:160]


def _kind(answer: dict[str, Any], detail: str) -> str:
    """Type and message of an exception; the last words of a process that ended without an answer."""
    if not answer:
        said = re.search(r"(FatalError: `[^`]*`|terminate called[^\n]*|what\(\):[^\n]*)", detail)
        return f"died: {said[1] if said else ''}"
    lines = [line.strip() for line in detail.splitlines()]
    said = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b|\(\w+\) ", line)]
    message = said[-1] if said else f"{answer['type']}: {answer['message']}"
    return general(message if answer["type"] in message else f"{answer['type']}: {message}")
