"""Plays steps of several models under several pipelines, one after the other, with numbers (``pipeline_numbers``).

The cases come as JSON, each with a name and the arguments of ``compared``; a case may have ``direct``: then values go straight
from the stage that makes them to all stages that read them. Writes JSON to the file of the last argument: by name the report of
each case, or what was wrong where ranks wait for each other.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pipeline_play
from pipeline_numbers import compared

from paddle_rbt_plugin.completion.distributed_ops import producer_of
from paddle_rbt_plugin.handover.engine import guard
from paddle_rbt_plugin.handover.pir.pipeline import _StagedAnnotation
from paddle_rbt_plugin.handover.pir.replay import LEAVES


def sent_directly(annotation: Any, value: Any, reader: Any, chunk: int) -> Any:
    """Takes the place of ``_StagedAnnotation._brought``."""
    producer, stages = producer_of(value), len(annotation.meshes)
    is_sent = producer.id() not in annotation.constants and producer.name() not in LEAVES
    stage = chunk % stages
    if not is_sent or stage == annotation.made_in[value.id] % stages:
        return stage_by_stage(annotation, value, reader, chunk)
    if (value.id, stage) not in annotation.copies:
        annotation.copies[value.id, stage] = annotation._moved(value, stage)
    return annotation.copies[value.id, stage]


stage_by_stage, check = _StagedAnnotation._brought, guard._check


def played(case: dict[str, Any]) -> dict[str, Any]:
    ranks = case["space"]["pp"] * case["space"]["dp"] * case["space"]["mp"]
    os.environ["PADDLE_TRAINERS_NUM"] = str(ranks)
    pipeline_play.forget()
    is_direct = case.pop("direct", False)
    _StagedAnnotation._brought = sent_directly if is_direct else stage_by_stage
    guard._check = (lambda *_: None) if is_direct else check  # it refuses to train so
    try:
        return compared(ranks=ranks, **case)
    except AssertionError as error:
        return {"wrong": str(error)}


if __name__ == "__main__":
    cases = json.loads(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps({name: played(case) for name, case in cases.items()}))
