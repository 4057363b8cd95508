"""What a plan is asked for is checked when the request is made, and plans are made of graphs with collection paused."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from searching import gpt_analysis

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.request import Request
from paddle_rbt_plugin.tuner import tune_graph

SETTINGS = Settings(cluster="1x2:A100-80G")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"global_batch": True}, "global_batch must be a whole number from 1"),
        ({"precision": "fp8"}, "one of fp32, fp16, bf16, not 'fp8'"),
    ],
)
def test_a_wrong_request_is_not_made(wrong, message) -> None:
    with pytest.raises(rbt.TunerError, match=message):
        Request(SETTINGS, **wrong)
    with pytest.raises(rbt.TunerError, match=message):
        replace(Request(SETTINGS), **wrong)


def test_a_request_has_the_cluster_that_its_settings_describe() -> None:
    request = Request(SETTINGS)
    assert str(request.cluster) == "1x2:A100-80G"
    assert replace(request, global_batch=4).cluster is request.cluster


def test_whatever_the_door_a_graph_is_planned_with_collection_paused() -> None:
    graph, seen = gpt_analysis(2, 4).graph, []
    assert gc.isenabled()
    tune_graph(graph, Request(SETTINGS, progress=lambda _: seen.append(gc.isenabled())))
    assert seen and not any(seen) and gc.isenabled()
