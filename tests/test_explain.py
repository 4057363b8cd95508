"""The explanation of a plan: what it says, and that it says it within the width."""

import dataclasses
import functools
import json

import pytest

from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.errors import PlanError
from paddle_rbt_plugin.handover.configs import config_graph
from paddle_rbt_plugin.models import GPTConfig
from paddle_rbt_plugin.plan.explain import WIDTH, group_rejected, reasons
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.spelling import spell_bytes, spell_candidate, spell_seconds
from paddle_rbt_plugin.tuner import tune_graph

GPT = GPTConfig(layers=4, hidden=64, ffn=256, heads=4, vocab=128, seq=32)
QUERY = "gpt.layers.1.attn.q_proj.weight"


@functools.cache
def plan(**space) -> Plan:
    return tune_graph(
        config_graph(GPT, 16), Settings(cluster="2x4:A100-80G", search_space=space), precision="bf16", global_batch=16
    )


def test_the_decision_comes_first_with_time_and_memory_in_parts():
    text = plan(mp=2, pp=1).explain()
    assert text.startswith("pp 1 x dp 4 x mp 2, micro batch ")
    assert "global batch" in text.split("\n\n")[0]
    for part in ("forward", "backward", "dp communication", "optimizer", "parameters", "activations"):
        assert f"\n  {part} " in text


def test_parts_of_the_time_are_given_as_shares_of_the_step():
    section = next(s for s in plan(mp=2, pp=1).explain().split("\n\n") if s.startswith("A step takes"))
    shares = [float(line.rsplit(" ", 1)[1].rstrip("%")) for line in section.splitlines()[1:]]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))


def test_runner_ups_are_other_ways_to_use_the_devices_with_what_they_lose_by():
    rows = reasons(plan())["runner_ups"]
    degrees = [(row["pp"], row["dp"], row["mp"]) for row in rows]
    assert len(set(degrees)) == len(degrees) > 1
    assert tuple(plan().degrees.values()) not in degrees
    assert [row["slower_s"] for row in rows] == sorted(row["slower_s"] for row in rows)
    for row in rows:
        assert row["slower_s"] == pytest.approx(row["step_time_s"] - plan().estimate.step_time_s)
        assert spell_candidate(row) in " ".join(plan().explain().split())  # it wraps where the line ends


def test_no_line_is_wider_than_it_should_be():
    assert max(map(len, plan().explain().splitlines())) <= WIDTH


def test_every_axis_says_where_it_communicates():
    where = [row["where"] for row in reasons(plan(mp=4, dp=2, pp=1))["communication"]]
    assert where == ["dp 2 crosses machines of 4", "mp 4 stays inside machines of 4"]
    assert "pp 4 crosses machines at 1 of its 3 cuts" in plan(pp=4).explain()


def test_rejected_candidates_are_grouped_by_reason_and_counted():
    made = plan(pp=1)
    text, groups = made.explain(), group_rejected(made.rejected)
    assert text.count("Rejected: ways") == 1
    assert all(group.how_many in text for group in groups)
    assert sum(group.count for group in groups) == len(made.rejected)
    assert any("search_space allows pp 1 only" in group.reason for group in groups)


def test_candidates_that_do_not_fit_are_told_from_ways_that_are_ruled_out():
    entries = [
        {"candidate": {"pp": 1, "dp": n, "mp": 1}, "reason": f"needs {n} GiB, 1 GiB more than 7 GiB", "count": 10 * n}
        for n in (1, 2)
    ]
    entries.append({"candidate": {"pp": 8, "dp": 1, "mp": 1}, "reason": "pp 8 exceeds the 4 layers of the model"})
    assert [group.how_many for group in group_rejected(entries)] == ["30 candidates of 2 ways", "1 way"]


def test_a_group_shows_the_candidate_that_came_nearest():
    reason = "needs {} GiB, {} GiB more than the 72.0 GiB that A100-80G has less its reserve"
    entries = [{"candidate": {"pp": 1, "dp": 1, "mp": n}, "reason": reason.format(72 + n, float(n))} for n in (40, 3, 7)]
    entries.append({"candidate": {"pp": 8, "dp": 1, "mp": 1}, "reason": "pp 8 exceeds the 4 layers of the model"})
    first, second = group_rejected(entries)
    assert (first.count, first.candidate["mp"], first.reason) == (3, 3, reason.format(75, 3.0))
    assert second.count == 1


def test_reasons_that_differ_in_the_unit_only_are_one_group():
    reason = "needs {}, {} more than the 72.0 GiB that A100-80G has less its reserve"
    misses = [("73.2 GiB", "1.20 GiB"), ("72.0 GiB", "12.3 KiB"), ("72.0 GiB", "3.00 MiB")]
    entries = [{"candidate": {"pp": 1, "dp": 1, "mp": n}, "reason": reason.format(*miss)} for n, miss in enumerate(misses)]
    (group,) = group_rejected(entries)
    assert (group.count, group.reason) == (3, reason.format(*misses[1]))


def test_patterns_are_named_with_distribution_and_version():
    assert "4 matches, paddle-rbt-plugin 0.1.0" in plan(mp=2, pp=1).explain()


def test_what_matched_nothing_and_notes_are_told():
    made = dataclasses.replace(plan(mp=2, pp=1), unmatched=("head.weight [64, 128], read by matmul_9",), notes=("take care",))
    assert "Matched by no pattern\n  head.weight [64, 128], read by matmul_9" in made.explain()
    assert made.explain().endswith("Notes\n  take care\n")


def test_no_line_is_longer_than_the_width():
    for made in (plan(), plan(mp=2, pp=1), plan(pp=4)):
        assert max(map(len, made.explain().splitlines())) <= WIDTH


def test_a_loaded_plan_explains_itself_as_the_one_that_was_saved(tmp_path):
    plan(mp=2, pp=1).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").explain() == plan(mp=2, pp=1).explain()


@pytest.mark.parametrize("by", ["name", "structured name"])
def test_a_tensor_is_explained_by_either_of_its_names(by):
    made = plan(mp=2, pp=1)
    name = QUERY if by == "structured name" else next(n for n, t in made.tensors.items() if t.structured_name == QUERY)
    text = made.explain(name)
    assert f"({QUERY})" in text.splitlines()[0]
    assert "dim 1 split over mp 2" in text
    assert "decided by    pattern qkv of paddle-rbt-plugin 0.1.0" in text


def test_a_whole_tensor_is_called_whole():
    assert "whole on every device of its stage" in plan(dp=8).explain(QUERY)


def test_a_misspelt_tensor_is_answered_with_the_nearest():
    with pytest.raises(
        PlanError, match=r"the plan places no tensor 'gpt\.layers\.1\.attn\.q_prj\.weight'; did you mean 'gpt\.lay"
    ):
        plan(mp=2, pp=1).explain("gpt.layers.1.attn.q_prj.weight")


@pytest.mark.parametrize(
    ("choices", "spelled"),
    [
        ({}, ""),
        ({"micro_batch": 4, "recompute": "full"}, ", micro batch 4, full recomputation"),
        ({"schedule": "VPP", "vpp": 2}, ", VPP of 2 chunks"),
        ({"sharding_stage": 3, "sharding_degree": 8}, ", sharding stage 3 over 8 replicas"),
        ({"sharding_stage": 2, "sequence_parallel": True}, ", sharding stage 2, sequence parallel"),
        ({"axes": ["mp", "dp"]}, ", mp outside dp"),
    ],
)
def test_a_candidate_is_spelled_with_what_is_not_as_usual(choices, spelled):
    assert spell_candidate({"pp": 1, "dp": 4, "mp": 2} | choices) == "pp 1 x dp 4 x mp 2" + spelled


@pytest.mark.parametrize(
    ("seconds", "spelled"), [(123.4, "123 s"), (1.034, "1.03 s"), (0.0123, "12.3 ms"), (4.2e-5, "42.0 us"), (0.0, "0.00 us")]
)
def test_seconds_have_three_digits(seconds, spelled):
    assert spell_seconds(seconds) == spelled


@pytest.mark.parametrize(
    ("size", "spelled"), [(3 * 2**30, "3.00 GiB"), (256_000_000, "244 MiB"), (2048, "2.00 KiB"), (7, "7 B")]
)
def test_bytes_have_three_digits(size, spelled):
    assert spell_bytes(size) == spelled


# --- is the prediction the program?


def test_a_saved_plan_is_verified_against_the_program_that_paddle_partitions(tmp_path):
    from click.testing import CliRunner

    from paddle_rbt_plugin.cli.main import cli

    config = tmp_path / "small.yaml"
    config.write_text("arch: gpt\nlayers: 4\nhidden: 64\nffn: 256\nheads: 8\nvocab: 1024\nseq: 32\n")
    plan = tmp_path / "plan.json"
    options = ["--cluster", "1x8:A100-80G", "--global-batch", "8", "--set", "mp=4", "--set", "pp=1", "--save", str(plan)]
    assert CliRunner().invoke(cli, ["plan", str(config), *options]).exit_code == 0
    verified = CliRunner().invoke(cli, ["explain", str(plan), "--verify", "--json"])
    assert verified.exit_code == 0, verified.output
    result = json.loads(verified.stdout)
    assert result["equal"] and result["differences"] == []
    assert {row["axis"] for row in result["stages"][0]["program"]["collectives"]} == {"dp", "mp"}

    other = tmp_path / "other.yaml"
    other.write_text(config.read_text().replace("ffn: 256", "ffn: 128"))
    refused = CliRunner().invoke(cli, ["explain", str(plan), "--verify", "--model", str(other)])
    assert refused.exit_code == 1 and "another program" in refused.output
