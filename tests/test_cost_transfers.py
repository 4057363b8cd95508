"""What stages send: every value once to each stage that reads it, and its gradient back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_cases import GPT, LLAMA, analysis_of, candidate, completed

from paddle_rbt_plugin.cluster import parse_cluster
from paddle_rbt_plugin.cost import Training, estimate
from paddle_rbt_plugin.cost.communication import collective_seconds
from paddle_rbt_plugin.cost.shared import SharedCosts
from paddle_rbt_plugin.cost.stages import even_split, even_stages
from paddle_rbt_plugin.cost.transfers import transfers

CLUSTER = parse_cluster("1x8:A100-80G")
TRAINING = Training(16)
HIDDEN = 2 * 128 * 256 * 4
"""Bytes of a hidden state of both configs at the traced batch of 2."""


def sent(completion, stages):
    return [(t.crossing.value.name, t.source, t.target, t.crossing.has_gradient) for t in transfers(completion, stages)]


def test_one_stage_sends_nothing() -> None:
    assert sent(completed(), (0, 0, 0, 0)) == []


def test_hidden_states_go_to_the_next_stage_and_a_tied_weight_to_the_last() -> None:
    found = sent(completed(), (0, 1, 2, 3))
    weight = [t for t in found if t[0].endswith("w_0")]
    hidden = [t for t in found if t[0].endswith(".out")]
    assert [t[1:] for t in weight] == [(0, 3, True)]
    assert [t[1:] for t in hidden] == [(0, 1, True), (1, 2, True), (2, 3, True)]


def test_a_table_that_all_layers_read_is_sent_once_to_each_stage_and_has_no_gradient() -> None:
    found = [t for t in sent(completed(LLAMA), (0, 0, 1, 1)) if not t[3]]
    assert len(found) == len({t[0] for t in found}) == 3  # sine, cosine and mask
    assert {t[1:3] for t in found} == {(0, 1)}


def test_stages_of_an_interleaved_schedule_send_at_every_cut() -> None:
    stages = even_stages(4, 2, 2)
    assert stages == (0, 1, 0, 1)
    assert [t[1:3] for t in sent(completed(), stages) if t[0].endswith(".out")] == [(0, 1), (1, 0), (0, 1)]


def test_the_first_stage_sends_no_gradient_and_the_last_nothing_ahead() -> None:
    shared = SharedCosts(CLUSTER, replace(TRAINING, own_copies=True))
    sends = shared.sends(completed(), candidate(pp=4), even_split(4, 4))
    hidden = collective_seconds("p2p", HIDDEN, shared.pair(0, 1), shared.constants)
    assert sends.ahead == pytest.approx([hidden] * 3 + [0])
    assert sends.back == pytest.approx([0] + [hidden] * 3)
    assert sends.received == (0, 0, 0, 0)


def test_a_tied_weight_costs_time_and_memory_on_the_last_stage() -> None:
    shared = SharedCosts(CLUSTER, TRAINING)
    sends = shared.sends(completed(), candidate(pp=2), even_split(4, 2))
    weight = GPT.vocab * GPT.hidden * 4
    messages = [HIDDEN, weight]
    seconds = sum(collective_seconds("p2p", n, shared.pair(0, 1), shared.constants) for n in messages)
    assert sends.back[1] == pytest.approx(seconds)
    assert sends.ahead[0] >= seconds
    assert sends.received[0] == 0 and sends.received[1] >= weight


def test_a_stage_mesh_sends_its_parts() -> None:
    shared = SharedCosts(CLUSTER, TRAINING)
    whole = shared.sends(completed(LLAMA), candidate(pp=2), even_split(4, 2))
    halved = shared.sends(completed(LLAMA, dp=2), candidate(pp=2, dp=2, micro_batch=1), even_split(4, 2))
    assert halved.back[1] < whole.back[1]


def test_the_gradient_of_a_tied_weight_is_reduced_in_every_micro_batch_where_stages_send_it() -> None:
    mesh = completed(dp=2).mesh
    alone, apart = (analysis_of(GPT).complete(mesh, stages) for stages in ((), (0, 0, 1, 1)))
    whole = [c for work in apart.work for k in work.backward for c in k.collectives if c.value.kind == "var"]
    weight = (GPT.vocab, GPT.hidden)
    assert sum(c.value.shape == weight for c in whole) == 2
    assert not any(c.value.shape == weight for w in alone.work for k in w.backward for c in k.collectives)
    assert sum(len(w.gradient_syncs) for w in apart.work) == sum(len(w.gradient_syncs) for w in alone.work) - 1


def test_cuts_of_a_model_without_shared_weights_have_one_completion() -> None:
    mesh = completed(LLAMA, dp=2).mesh
    works = {id(analysis_of(LLAMA).complete(mesh, stages).work) for stages in ((), (0, 0, 1, 1), (0, 1, 2, 3))}
    assert len(works) == 1


def test_copies_of_its_own_save_a_stage_the_transfers() -> None:
    plain, copies = (
        estimate(completed(), candidate(pp=2), CLUSTER, replace(TRAINING, own_copies=own)) for own in (False, True)
    )
    assert copies.time["p2p"] < plain.time["p2p"]
    assert copies.stages[1].parameters > plain.stages[1].parameters
