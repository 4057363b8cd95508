"""Paddle's own tuner on cases of the suite, in a process of its own beside ours.

It reads legacy programs, so its process imports Paddle without PIR, and takes minutes, so it runs while ours plans. It chooses
pp, dp and mp and knows neither micro batches nor recomputation nor ZeRO; so it is shown one sample per device, where a plan is
easiest to find, and what it leaves open is chosen in its favour, as for a published strategy.

Run as a program, the module reads requests from its standard input as JSON and answers each with a line of JSON.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from paddle_rbt_plugin.bench.case import Case
from paddle_rbt_plugin.model_reference import model_config
from paddle_rbt_plugin.plugins import parse_cluster
from paddle_rbt_plugin.processes import end_with_parent, unwound_on_sigterm


@dataclass(frozen=True)
class Answer:
    """What the reference chose (a part of the search space) and the CPU seconds it took, or why it chose nothing."""

    strategy: Mapping[str, Any] | None = None
    tuning_s: float | None = None
    reason: str = ""


class ReferenceTuner:
    """Paddle's own tuner at work on the cases that it can be asked about; a context, at whose end it is stopped.

    ``limit`` is the seconds that it has for all of them together."""

    def __init__(self, cases: Sequence[Case], limit: float):
        self._reasons = {case.name: _not_asked(case) for case in cases}
        self._asked = [case for case in cases if not self._reasons[case.name]]
        self._limit = limit
        self._answers: queue.Queue[str] = queue.Queue()
        self._known: dict[str, Answer] = {}
        self._signals = ExitStack()

    def __enter__(self) -> ReferenceTuner:
        self._end = time.monotonic() + self._limit
        if self._asked:
            self._signals.enter_context(unwound_on_sigterm())
            self._start()
        return self

    def _start(self) -> None:
        command = [sys.executable, "-W", "ignore", "-m", __name__]
        environment = {**os.environ, "FLAGS_enable_pir_api": "0"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload]
        print(json.dumps([_request(case) for case in self._asked]), file=self._process.stdin, flush=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __exit__(self, *_: object) -> None:
        with self._signals:
            if self._asked:
                self._process.kill()
                self._process.wait()
                self._reader.join()
                self._process.stdin.close()
                self._process.stdout.close()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")  # it has ended

    def answer(self, case: Case) -> Answer:
        """What it chose for a case; waits for it as long as the limit allows."""
        if self._reasons[case.name]:
            return Answer(reason=self._reasons[case.name])
        while case.name not in self._known:
            try:
                line = self._answers.get(timeout=max(0.0, self._end - time.monotonic()))
            except queue.Empty:
                return Answer(reason=f"stopped: the {self._limit:g} s for all cases were used up")
            if not line:
                self._answers.put("")
                return Answer(reason="its process ended without an answer")
            name, answer = json.loads(line)
            self._known[name] = Answer(**answer)
        return self._known[case.name]


def _not_asked(case: Case) -> str:
    cluster = parse_cluster(case.cluster)
    if cluster.machines > 1:
        return "it fails on more than one machine"
    if model_config(case.model, case.seq) is None:
        return "it is run for named models and config files only"
    return ""


def _request(case: Case) -> dict[str, Any]:
    return {"name": case.name, "model": case.model, "seq": case.seq, "cluster": parse_cluster(case.cluster).to_dict()}


def _answer(model: str, seq: int | None, cluster: Mapping[str, Any]) -> dict[str, Any]:
    import paddle
    from paddle.utils import unique_name

    from paddle_rbt_plugin.handover.legacy.ops import legacy_static_ops
    from paddle_rbt_plugin.handover.legacy.reference import reference_degrees
    from paddle_rbt_plugin.models import build, input_spec

    config, devices = model_config(model, seq), parse_cluster(cluster)
    assert config is not None  # nothing else is asked about
    main, startup = paddle.static.Program(), paddle.static.Program()
    with legacy_static_ops(), paddle.static.program_guard(main, startup), unique_name.guard():
        specs = input_spec(config, devices.device_count)
        loss = build(config)(*[paddle.static.data(s.name, list(s.shape), s.dtype) for s in specs])
    started = time.process_time()
    try:
        degrees = reference_degrees(main, startup, loss, specs[0].name, devices)
    except Exception as error:  # whatever Paddle raises is the answer
        return {"reason": f"it raises {type(error).__name__}: {str(error).splitlines()[0][:100]}"}
    return {"strategy": degrees, "tuning_s": time.process_time() - started}


def main() -> None:
    """Answers the requests on standard input, one line, in their order."""
    requests = json.loads(sys.stdin.readline())
    end_with_parent()
    import paddle

    paddle.enable_static()
    out, sys.stdout = sys.stdout, sys.stderr  # Paddle's tuner prints
    for request in requests:
        print(json.dumps([request.pop("name"), _answer(**request)]), file=out, flush=True)


if __name__ == "__main__":
    main()
