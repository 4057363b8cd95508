"""The programs of evaluation of all ranks of a pipeline, played against each other in one process; prints how many messages
were sent. Evaluation has no jobs: each rank runs its program as it is.

    pipeline_evaluation.py MODEL SPACE RANKS SCHEDULE
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pipeline_engine import as_rank, make_jobs, prepared
from pipeline_play import check_message, play


class Whole:
    """A program as the only job of a rank."""

    def __init__(self, program: Any):
        self.program = program

    def job_list(self) -> list[Whole]:
        return [self]

    def ir_program(self, _: str) -> Any:
        return self.program

    def type(self) -> str:
        return "evaluation"

    def micro_batch_id(self) -> int:
        return 0


if __name__ == "__main__":
    model, space, ranks, schedule = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    plans = {}
    for rank in range(ranks):
        engine = prepared(rank, model, space, ranks, schedule)
        jobs = engine._job_plan
        as_rank(rank)
        make_jobs(rank, engine, model, "eval")
        assert engine._job_plan is jobs, "evaluation has taken the place of the jobs of training"
        plans[rank] = Whole(engine._pir_dense_main_progs["eval"])
    sent = play(plans, check_message)
    print("REPORT" + json.dumps({"sent": sent}))
