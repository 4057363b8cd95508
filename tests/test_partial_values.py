"""What Paddle leaves partial is settled before the first op that needs it, so that ranks train the serial model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import paddle
import pytest
from launching import WORKERS, launch_all
from paddle import nn
from paddle.static import InputSpec

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.completion import operands
from paddle_rbt_plugin.handover.pir import partitioning, patches
from paddle_rbt_plugin.handover.pir.replay import annotate
from paddle_rbt_plugin.handover.pir.trace import Trace, trace_layer
from paddle_rbt_plugin.handover.pir.verification import verify

sys.path.insert(0, str(WORKERS))
from partial_values import BATCH, LENGTH, SHAPES, WIDTH, Network, token_loss


def traced(shape: Callable[[Network, Any], Any]) -> Trace:
    inputs, labels = (InputSpec([BATCH, LENGTH], "int64", name) for name in ("ids", "labels"))
    return trace_layer(Network(shape), [inputs], token_loss, [labels])


def differences(trace: Trace, **space: int) -> Sequence[str]:
    plan = rbt.tune(trace.program, cluster="1x2:CPU", search_space={"pp": 1, "sharding_stage": 0, **space})
    return [line for stage in verify(plan, trace.graph, trace.program) for line in stage.differences]


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_settled_is_predicted(name: str) -> None:
    if name == "batched products" and paddle.__version__ < "3.2":
        pytest.skip("Paddle before 3.2 gathers the batch of bmm")
    trace = traced(SHAPES[name])
    assert not differences(trace, mp=2)
    assert not differences(trace, dp=2)


@pytest.mark.parametrize("name", ["embedding, concat", "embedding, slice", "divided product, split"])
def test_paddle_would_read_partial_gradients_as_if_they_were_sums(name: str) -> None:
    with patches.gradients_whole.left_out():
        assert differences(traced(SHAPES[name]), mp=2)


def test_paddle_would_read_the_shards_in_a_list_as_if_they_were_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_reshard_lists", lambda _: None)
    assert differences(traced(SHAPES["embedding, concat with a token"]), dp=2)


@pytest.mark.parametrize("op", ["p_norm", "logsumexp"])
def test_paddle_would_sum_what_is_no_sum(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    name = {"p_norm": "norm of a divided dimension", "logsumexp": "logsumexp of a divided dimension"}[op]

    def all_reduced() -> int:
        trace = traced(SHAPES[name])
        plan = rbt.tune(trace.program, cluster="1x2:CPU", search_space={"pp": 1, "sharding_stage": 0, "mp": 2})
        (stage,) = verify(plan, trace.graph, trace.program)
        number = BATCH * LENGTH * 4
        return sum(n for key, n in stage.found.collectives.items() if key[:2] == ("forward", "all_reduce") and key[3] == number)

    assert all_reduced() == 0
    monkeypatch.setattr(operands, "SUMMING", operands.SUMMING | {op})
    assert all_reduced() == 1


def test_the_update_of_an_optimizer_without_a_rule_would_gather_what_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    from paddle_rbt_plugin.handover.pir import updates

    trace = traced(lambda n, i: n.head(n.ffn(n.words(i))))
    monkeypatch.setattr(paddle.optimizer, "AdamW", paddle.optimizer.Momentum)  # of which ``verify`` makes the update

    def gathered() -> list[str]:
        return [line for line in differences(trace, mp=2) if "optimizer all_gather" in line]

    assert not gathered()
    monkeypatch.setattr(updates, "shard_updates", lambda _: None)
    assert gathered()


def test_states_of_parameters_that_nothing_reads_are_dropped() -> None:
    class Idle(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            return self.used(x).square().mean()

    trace = trace_layer(Idle(), [InputSpec([BATCH, WIDTH], "float32", "x")])
    with partitioning.as_rank(0):
        plan = rbt.tune(trace.program, cluster="1x2:CPU", search_space={"dp": 2})
        copy = trace.program.clone()
        placements = {name: t.placement for name, t in plan.leaves(trace.graph).items()}
        annotate(copy, plan.stages[0].process_mesh, placements)
        program = partitioning.partition(copy).program
    states = [op for op in program.global_block().ops if op.name() == "pd_op.data"]
    assert all(op.result(0).is_dist() for op in states)


@pytest.mark.slow
def test_ranks_train_the_serial_model_whatever_reads_a_partial_value(tmp_path: Path) -> None:
    by_rank = launch_all("partial_values.py", 2, tmp_path / "out", timeout=900)
    for rank, found in enumerate(by_rank):
        failed = {name: text for name, text in found.items() if isinstance(text, str)}
        assert not failed, f"rank {rank}: {failed}"
        wrong = {name: d for name, d in found.items() if not (d["loss"] < 1e-5 and d["weight"] < 1e-4)}
        assert not wrong, f"rank {rank}: {wrong}"
