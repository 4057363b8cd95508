"""Memory: training states, and activations against the closed forms of arXiv 2205.05198."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_cases import DROPPING_GPT, GPT, candidate, completed

from paddle_rbt_plugin.cluster import parse_cluster
from paddle_rbt_plugin.cost import Candidate, Training, estimate
from paddle_rbt_plugin.cost.memory import state_bytes

CLUSTER = parse_cluster("1x8:A100-80G")
HALF = Training(8, "fp16")
S, H, A = DROPPING_GPT.seq, DROPPING_GPT.hidden, DROPPING_GPT.heads


def block_bytes(mp: int, micro_batch: int = 4, **choices: object) -> float:
    """Bytes per block that one micro batch keeps: two depths of pipeline stages that differ in a block only."""
    one = Candidate(2, 1, mp, micro_batch, 1, **choices)  # type: ignore[arg-type]
    completion = completed(DROPPING_GPT, mp=mp)
    long, short = (
        estimate(completion, one, CLUSTER, HALF, stage_layers=layers).stages[0].memory["activations"]
        for layers in ((3, 1), (2, 2))
    )
    return long - short


@pytest.mark.parametrize("t", [1, 2, 4])
def test_tensor_parallel_block_keeps_equation_2(t: int) -> None:
    sbh = S * 4 * H
    assert block_bytes(t) == pytest.approx(sbh * (10 + 24 / t + 5 * A * S / (H * t)), rel=0.002)


@pytest.mark.parametrize("t", [2, 4])
def test_sequence_parallel_block_keeps_equation_4(t: int) -> None:
    sbh = S * 4 * H
    assert block_bytes(t, sequence_parallel=True) == pytest.approx(sbh / t * (34 + 5 * A * S / H), rel=0.002)


@pytest.mark.parametrize("t", [2, 4])
def test_selective_recomputation_leaves_equation_6(t: int) -> None:
    sbh = S * 4 * H
    kept = block_bytes(t, sequence_parallel=True, recompute="selective")
    assert kept == pytest.approx(34 * sbh / t, rel=0.002)


def test_full_recomputation_keeps_the_input_of_each_block() -> None:
    assert block_bytes(2, recompute="full") == 2 * S * 4 * H


def test_states_of_mixed_precision_adam_are_sixteen_bytes_per_parameter() -> None:
    states = state_bytes(1000, 1000, candidate(), Training(8, "bf16"), 1)
    assert sum(vars(states).values()) == 16_000


@pytest.mark.parametrize(("stage", "nbytes"), [(0, 16.0), (1, 2 + 2 + 12 / 4), (2, 2 + 14 / 4), (3, 16 / 4)])
def test_zero_splits_what_its_stage_says(stage: int, nbytes: float) -> None:
    states = state_bytes(1.0, 1.0, candidate(dp=4, sharding_stage=stage), Training(8, "fp16"), 4)
    assert sum(vars(states).values()) == pytest.approx(nbytes)


@pytest.mark.parametrize(("optimizer", "states"), [("adamw", 8), ("momentum", 4), ("sgd", 0)])
def test_optimizer_decides_its_states(optimizer: str, states: int) -> None:
    training = Training(8, "fp32", optimizer=optimizer)  # type: ignore[arg-type]
    assert state_bytes(1, 1, candidate(), training, 1).optimizer_states == states


def test_parameters_are_the_sum_of_local_shapes() -> None:
    whole = sum(v.local_numel(completed().mesh, 1.0) for w in completed().work for v in w.params)
    assert estimate(completed(), candidate(), CLUSTER, HALF).stages[0].parameters == whole
    halved = estimate(completed(mp=2), candidate(mp=2), CLUSTER, HALF).stages[0].parameters
    assert whole / 2 < halved < whole


def test_a_tied_embedding_lives_on_one_stage_or_on_both_where_stages_hold_copies() -> None:
    stages = estimate(completed(), candidate(pp=2), CLUSTER, HALF).stages
    whole = estimate(completed(), candidate(), CLUSTER, HALF).stages[0].parameters
    assert sum(s.parameters for s in stages) == whole
    copies = estimate(completed(), candidate(pp=2), CLUSTER, replace(HALF, own_copies=True)).stages
    assert sum(s.parameters for s in copies) == whole + GPT.vocab * GPT.hidden
