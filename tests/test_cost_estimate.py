"""The estimate of whole candidates."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from cost_cases import DROPPING_GPT, GPT, LLAMA, candidate, completed

from paddle_rbt_plugin.cluster import Cluster, parse_cluster
from paddle_rbt_plugin.cost import DEFAULT, Candidate, Estimate, Training, estimate
from paddle_rbt_plugin.errors import TunerError

CLUSTER = parse_cluster("2x8:A100-80G")
TRAINING = Training(16, "fp16")
CANDIDATES = [
    candidate(),
    candidate(dp=8),
    candidate(mp=4),
    candidate(dp=4, mp=2, recompute="full"),
    candidate(dp=2, mp=4, sequence_parallel=True, recompute="selective"),
    candidate(pp=2, dp=2, mp=4, sharding_stage=1),
    candidate(pp=4, schedule="FThenB"),
    candidate(pp=2, vpp=2, schedule="VPP"),
    candidate(dp=8, sharding_stage=3),
]


def estimated(choice: Candidate, training: Training = TRAINING, cluster: Cluster = CLUSTER, **more: object) -> Estimate:
    completion = completed(GPT, choice.dp, choice.mp)
    return estimate(completion, choice, cluster, training, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("choice", CANDIDATES, ids=str)
def test_breakdowns_add_up_and_nothing_is_negative(choice: Candidate) -> None:
    found = estimated(choice)
    assert sum(found.time.values()) == pytest.approx(found.step_time_s)
    assert sum(found.memory.values()) == pytest.approx(found.peak_memory_bytes)
    assert all(v >= -1e-12 for v in (*found.time.values(), *found.memory.values()))
    assert found.peak_memory_bytes == max(s.peak_memory_bytes for s in found.stages)
    assert len(found.stages) == choice.pp
    json.dumps(asdict(found))


@pytest.mark.parametrize("choice", CANDIDATES, ids=str)
def test_the_same_question_has_the_same_answer(choice: Candidate) -> None:
    assert estimated(choice) == estimated(choice)


@pytest.mark.parametrize("choice", CANDIDATES, ids=str)
def test_a_faster_network_is_never_slower(choice: Candidate) -> None:
    assert estimated(choice, cluster=CLUSTER.with_network(1e12)).step_time_s <= estimated(choice).step_time_s


@pytest.mark.parametrize("arch", [GPT, LLAMA], ids=["gpt", "llama"])
def test_flop_of_a_gpt_step_are_those_of_the_published_formula(arch: object) -> None:
    if arch is LLAMA:
        layers, h, s, v, f = LLAMA.layers, LLAMA.hidden, LLAMA.seq, LLAMA.vocab, LLAMA.ffn
        expected = 6 * 8 * s * (layers * (4 * h * h + 3 * h * f + 2 * s * h) + h * v)
    else:  # arXiv 2104.04473, equation 3, without its forward pass of recomputation in the blocks
        layers, h, s, v = GPT.layers, GPT.hidden, GPT.seq, GPT.vocab
        expected = 72 * 8 * s * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))
    found = estimate(completed(arch), candidate(), CLUSTER, TRAINING)  # type: ignore[arg-type]
    assert found.model_flop == pytest.approx(expected)
    assert found.tflops_per_gpu == pytest.approx(expected / found.step_time_s / 1e12)


def test_flop_do_not_depend_on_how_the_model_is_sharded() -> None:
    choices = [candidate(), candidate(dp=2, accumulate_steps=2), candidate(mp=2), candidate(pp=2)]
    assert len({round(estimated(c).model_flop) for c in choices}) == 1


def test_recomputation_takes_time_and_saves_memory() -> None:
    none, selective, full = (estimated(candidate(recompute=r)) for r in ("none", "selective", "full"))
    assert none.memory["activations"] > selective.memory["activations"] > full.memory["activations"]
    assert none.time["recompute"] == 0 < selective.time["recompute"] < full.time["recompute"]


def test_full_recomputation_runs_the_blocks_forward_once_more_with_their_collectives() -> None:
    none, full = (estimated(candidate(mp=4, recompute=r)) for r in ("none", "full"))
    assert full.time["mp_communication"] == pytest.approx(none.time["mp_communication"] * 1.5, rel=0.1)


def test_communication_in_the_passes_is_named_after_what_communicates() -> None:
    alone, replicas, tensors = (estimated(c).time for c in (candidate(), candidate(dp=4), candidate(mp=4)))
    assert alone["mp_communication"] == alone["batch_communication"] == 0
    assert replicas["batch_communication"] > 0 == replicas["mp_communication"]  # the loss of the whole batch
    assert tensors["mp_communication"] > 0 == tensors["batch_communication"]


def test_sequence_parallelism_splits_what_tensor_parallelism_replicates() -> None:
    plain, split = (estimated(candidate(mp=4, sequence_parallel=s)) for s in (False, True))
    assert split.memory["activations"] < plain.memory["activations"]
    assert split.time["forward"] < plain.time["forward"]


def test_zero_saves_memory_with_every_stage() -> None:
    peaks = [estimated(candidate(dp=8, sharding_stage=z)).peak_memory_bytes for z in range(4)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4


def test_splitting_states_over_a_part_of_the_replicas_sends_less_between_machines_and_keeps_more() -> None:
    whole, part = (
        estimated(
            candidate(dp=16, sharding_stage=3, sharding_degree=d, accumulate_steps=8), cluster=parse_cluster("4x4:A100-80G")
        )
        for d in ("whole", 4)
    )
    assert part.time["dp_communication"] < whole.time["dp_communication"]
    assert part.time["optimizer"] == pytest.approx(4 * whole.time["optimizer"])
    assert part.memory["optimizer_states"] == pytest.approx(4 * whole.memory["optimizer_states"])


def test_a_pipeline_is_more_than_one_micro_batch_and_its_bubble_shrinks_with_more_of_them() -> None:
    shares = [
        estimated(candidate(pp=4, accumulate_steps=m)).time["bubble"]
        / estimated(candidate(pp=4, accumulate_steps=m)).step_time_s
        for m in (4, 16, 64)
    ]
    assert shares == sorted(shares, reverse=True)


def test_stages_may_be_uneven() -> None:
    found = estimated(candidate(pp=2), stage_layers=(1, 3))
    assert [s.layers for s in found.stages] == [((0, 0),), ((1, 3),)]


@pytest.mark.parametrize("layers", [(4, 0), (1, 1), (1, 1, 2)])
def test_a_split_that_is_none_is_an_error(layers: tuple[int, ...]) -> None:
    with pytest.raises(TunerError, match="layers"):
        estimated(candidate(pp=2), stage_layers=layers)


def test_more_stages_than_layers_is_an_error() -> None:
    with pytest.raises(TunerError, match="4 layers cannot be cut into 8 stages"):
        estimated(candidate(pp=8))


def test_memory_is_checked_stage_by_stage_with_the_reserve() -> None:
    mixed = parse_cluster("1x8:A100-80G+1x8:V100-16G")
    choice = candidate(pp=2, dp=8)
    limits = [s.memory_limit_bytes for s in estimated(choice, cluster=mixed, memory_reserve=0.25).stages]
    assert limits == [0.75 * 80 * 2**30, 0.75 * 16 * 2**30]
    assert estimated(choice, cluster=mixed).fits
    assert not estimated(choice, cluster=mixed, memory_reserve=1 - 1e-6).fits


def test_evaluation_keeps_nothing_for_backward_and_updates_nothing() -> None:
    evaluation = replace(TRAINING, mode="eval")
    completion = completed(GPT, 2)
    found = estimate(completion, candidate(dp=2), CLUSTER, evaluation)
    assert found.memory["optimizer_states"] == found.memory["gradients"] == found.memory["activations"] == 0
    assert found.time["optimizer"] == found.time["dp_communication"] == 0


def test_half_precision_is_faster_and_keeps_a_master_copy() -> None:
    full, half = estimated(candidate(), Training(16, "fp32")), estimated(candidate(), Training(16, "bf16"))
    assert half.step_time_s < full.step_time_s
    assert half.memory["master_weights"] == 2 * half.memory["parameters"]
    assert full.memory["master_weights"] == 0


def test_gradients_that_overlap_backward_expose_less() -> None:
    plain, overlapped = (
        estimated(candidate(dp=8), replace(TRAINING, overlap_gradients=o)).time["dp_communication"] for o in (False, True)
    )
    assert overlapped <= plain


def test_input_gradients_that_overlap_weight_gradients_cost_less() -> None:
    plain, overlapped = (
        estimated(candidate(mp=4, micro_batch=8), replace(TRAINING, overlap_mp=o)).time["mp_communication"]
        for o in (False, True)
    )
    assert overlapped < plain


def test_fused_attention_saves_time_and_memory() -> None:
    alone, fused = (
        estimate(completed(DROPPING_GPT), candidate(), CLUSTER, replace(TRAINING, fused_attention=f)) for f in (False, True)
    )
    assert fused.step_time_s < alone.step_time_s
    assert fused.memory["activations"] < alone.memory["activations"]
    assert fused.memory["temporaries"] < alone.memory["temporaries"]


def test_shared_keys_and_values_are_copied_without_communication() -> None:
    few, all_ = (
        estimate(completed(replace(LLAMA, kv_heads=n), dp=2, mp=2), candidate(dp=2, mp=2), CLUSTER, TRAINING) for n in (2, 4)
    )
    assert few.time["mp_communication"] == pytest.approx(all_.time["mp_communication"], rel=0.05)


def test_a_small_model_waits_for_its_host() -> None:
    assert estimated(candidate(micro_batch=1)).time["host"] > 0
    patient = replace(DEFAULT, host_launch_s=0.0)
    assert estimated(candidate(micro_batch=1), constants=patient).time["host"] == 0
