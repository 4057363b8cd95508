"""What stages send: hidden states and what else is of a batch, from each stage to the next, and their gradients back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_cases import GPT, LLAMA, analysis_of, candidate, completed

from paddle_rbt_plugin.cluster import parse_cluster
from paddle_rbt_plugin.completion import Completion, Crossing, Placement, Value
from paddle_rbt_plugin.cost import Estimate, Training, estimate
from paddle_rbt_plugin.cost.communication import collective_seconds
from paddle_rbt_plugin.cost.stages import make_cut
from paddle_rbt_plugin.cost.table import CostTable, Strategy
from paddle_rbt_plugin.cost.transfers import copies, transfers

CLUSTER = parse_cluster("1x8:A100-80G")
TRAINING = Training(16)
PLAIN = Strategy("none", sequence_parallel=False)
HIDDEN = 2 * 128 * 256 * 4
"""Bytes of a hidden state of both configs at the traced batch of 2."""


def sent(completion, stages):
    return [(t.crossing.value.name, t.source, t.target, t.returns) for t in transfers(completion, stages)]


def test_one_stage_sends_nothing() -> None:
    assert sent(completed(), (0, 0, 0, 0)) == []


def test_hidden_states_go_to_the_next_stage_and_nothing_else_is_sent() -> None:
    for config in (GPT, LLAMA):
        assert [t[1:] for t in sent(completed(config), (0, 1, 2, 3))] == [(0, 1, True), (1, 2, True), (2, 3, True)]


def test_a_tied_weight_has_a_copy_on_the_last_stage() -> None:
    ((crossing, *stages),) = copies(completed(), (0, 1, 2, 3))
    assert (crossing.value.shape, crossing.has_gradient, stages) == ((GPT.vocab, GPT.hidden), True, [0, 3])
    assert not list(copies(completed(LLAMA), (0, 1, 2, 3)))


def test_what_is_of_no_batch_is_computed_where_it_is_read_and_inputs_are_fed_there() -> None:
    tables = [(crossing.value.name, stage) for crossing, _, stage in copies(completed(LLAMA), (0, 0, 1, 1), "computed")]
    assert len(tables) == 3 and {stage for _, stage in tables} == {1}  # sine, cosine and mask
    assert [(c.value.name, stage) for c, _, stage in copies(completed(), (0, 0, 1, 2), "fed")] == [
        ("attention_mask", 1),
        ("attention_mask", 2),
    ]


def shared_value(read_by: tuple[int, ...], returning: tuple[int, ...]) -> Completion:
    """One value that layer 0 makes."""
    value = Value("shared", (4, 4), "float32", Placement.replicated(2))
    return replace(completed(), crossings=(Crossing(value, 0, read_by, returning),))


@pytest.mark.parametrize(
    ("read_by", "returning", "stages", "expected"),
    [
        # It passes through stages that do not read it, and a gradient comes back from where one is made.
        ((3,), (3,), (0, 1, 2, 3), [(0, 1, True), (1, 2, True), (2, 3, True)]),
        ((1, 2, 3), (2,), (0, 1, 2, 3), [(0, 1, True), (1, 2, True), (2, 3, False)]),
        ((1,), (), (0, 0, 1, 2), []),
        # A stage that has had it in one chunk has it in the next.
        ((1, 2, 3), (1, 2, 3), (0, 1, 0, 1), [(0, 1, True)]),
        ((2, 3), (3,), (0, 1, 0, 1), [(0, 1, True)]),
    ],
)
def test_a_value_goes_from_stage_to_stage_to_the_last_that_reads_it(read_by, returning, stages, expected) -> None:
    assert [t[1:] for t in sent(shared_value(read_by, returning), stages)] == expected


def test_stages_of_an_interleaved_schedule_send_at_every_cut() -> None:
    stages = make_cut(4, 2, 2).stage_of_layer
    assert stages == (0, 1, 0, 1)
    assert [t[1:3] for t in sent(completed(), stages) if t[0].endswith(".out")] == [(0, 1), (1, 0), (0, 1)]


def test_the_first_stage_sends_no_gradient_and_the_last_nothing_ahead() -> None:
    table = CostTable(CLUSTER, replace(TRAINING, own_copies=True))
    sends = table.sends(completed(), make_cut(4, 4), PLAIN, (2, 4))
    for micro_batch, nbytes in enumerate((HIDDEN, 2 * HIDDEN)):
        hidden = collective_seconds("p2p", nbytes, table.machines.pair(0, 1), table.constants)
        assert sends.ahead[micro_batch] == pytest.approx([hidden] * 3 + [0])
        assert sends.back[micro_batch] == pytest.approx([0] + [hidden] * 3)
    assert not sends.received.any()


def pipelined(own_copies: bool = False, **more: object) -> Estimate:
    completion = completed() if own_copies else analysis_of(GPT).complete(completed().mesh, (0, 0, 1, 1))
    return estimate(completion, candidate(pp=2, **more), CLUSTER, replace(TRAINING, own_copies=own_copies))


def test_a_tied_weight_and_its_states_lie_on_both_ends() -> None:
    apart, alone = pipelined(), estimate(completed(), candidate(pp=2), CLUSTER, TRAINING)
    weight = GPT.vocab * GPT.hidden
    for both, one, extra in zip(apart.stages, alone.stages, (0, weight), strict=True):
        assert both.parameters == one.parameters + extra
        for purpose, nbytes in (("parameters", 4), ("gradients", 4), ("optimizer_states", 8)):
            assert both.memory[purpose] == one.memory[purpose] + nbytes * extra


def test_both_ends_exchange_the_gradient_of_a_tied_weight_once_a_step() -> None:
    machines = CostTable(CLUSTER, TRAINING).machines
    message = collective_seconds("p2p", GPT.vocab * GPT.hidden * 4, machines.pair(0, 1), machines.constants)
    for steps in (4, 16):
        assert pipelined(accumulate_steps=steps).time["dp_communication"] == pytest.approx(2 * message)


def test_a_stage_mesh_sends_its_parts() -> None:
    table, cut = CostTable(CLUSTER, TRAINING), make_cut(4, 2)
    whole = table.sends(completed(LLAMA), cut, PLAIN, (2,))
    halved = table.sends(completed(LLAMA, dp=2), cut, PLAIN, (1,))
    assert halved.back[0, 1] < whole.back[0, 1]


def test_the_gradient_of_a_tied_weight_is_reduced_on_both_ends_once_a_step() -> None:
    mesh = completed(dp=2).mesh
    alone, apart = (analysis_of(GPT).complete(mesh, stages) for stages in ((), (0, 0, 1, 1)))
    ((tied, *_),) = copies(apart, (0, 0, 1, 1))
    weight = f"{tied.value.name}@GRAD"
    for completion, ends in ((alone, 1), (apart, 2)):
        assert sum(c.value.name == weight for w in completion.work for c in w.gradient_syncs) == ends
        assert not any(c.value.name == weight for w in completion.work for k in w.backward for c in k.collectives)


def test_cuts_of_a_model_without_shared_weights_have_one_completion() -> None:
    mesh = completed(LLAMA, dp=2).mesh
    works = {id(analysis_of(LLAMA).complete(mesh, stages).work) for stages in ((), (0, 0, 1, 1), (0, 1, 2, 3))}
    assert len(works) == 1


def test_stages_of_megatron_have_the_same_copies() -> None:
    plain, copies = pipelined(), pipelined(own_copies=True)
    assert copies.time["p2p"] == pytest.approx(plain.time["p2p"])
    assert [s.parameters for s in copies.stages] == [s.parameters for s in plain.stages]
