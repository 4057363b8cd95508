"""The explanation of a plan: what it says, and that it says it within the width."""

import dataclasses
import functools
import json

import pytest

from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.errors import PlanError
from paddle_rbt_plugin.handover.pir.configs import config_graph
from paddle_rbt_plugin.models import GPTConfig
from paddle_rbt_plugin.plan.explain import WIDTH, group_rejected, group_unmatched, reasons
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.request import Request
from paddle_rbt_plugin.search.rejections import Rejected, reason
from paddle_rbt_plugin.spelling import spell_bytes, spell_candidate, spell_seconds
from paddle_rbt_plugin.tuner import tune_graph

GPT = GPTConfig(layers=4, hidden=64, ffn=256, heads=4, vocab=128, seq=32)
QUERY = "gpt.layers.1.attn.q_proj.weight"


@functools.cache
def plan(**space) -> Plan:
    return tune_graph(
        config_graph(GPT, 16), Request(Settings(cluster="2x4:A100-80G", search_space=space), precision="bf16", global_batch=16)
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


def test_every_stage_says_which_layers_it_holds_on_which_devices():
    text = " ".join(plan(pp=2, schedule="1F1B").explain().split())
    assert "stages 0 to 1 2 layers each, in stage 0 layers 0 to 1; 4 devices each of 0 to 7, A100-80G" in text
    interleaved = plan(pp=2, schedule="VPP", vpp=2)
    assert "in stage 0 layers 0, 2; 4 devices each" in " ".join(interleaved.explain().split())
    stages = reasons(interleaved)["stages"]
    assert [[run["layers"] for run in stage["runs"]] for stage in stages] == [[[0, 0], [2, 2]], [[1, 1], [3, 3]]]
    assert [stage["devices"] for stage in stages] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert "pp 2 crosses machines at 3 of its 3 cuts" in interleaved.explain()
    assert "Stages" not in plan(pp=1).explain()


def test_uneven_stages_and_layers_that_differ_are_told_apart():
    made = plan(pp=2, dp=2, mp=2, schedule="1F1B")
    first, second = made.stages
    whole = dataclasses.replace(first, layers=(0, 0), mesh=(4,), axes=("dp",), recompute="full")
    stages = (whole, dataclasses.replace(first, layers=(1, 2), recompute="none"), dataclasses.replace(second, layers=(3, 3)))
    text = " ".join(dataclasses.replace(made, stages=stages, level="o2").explain().split())
    assert "stage 0 layers 0 (dp 4, full recomputation), 1 to 2 (dp 2 x mp 2, no recomputation); devices 0 to 3" in text
    assert "stage 1 layers 3 (dp 2 x mp 2); devices 4 to 7" in text
    assert "dp 4 stays inside machines of 4 (layer 0)" in text and "mp 2 stays inside machines of 4 (layers 1 to 3)" in text
    assert "pp 2 crosses machines at 1 of its 1 cut" in text


def test_the_level_is_told_and_what_a_higher_one_would_do_for_several_kinds_of_machines():
    assert "level o1: one strategy for all layers" in " ".join(plan().explain().split())
    assert reasons(plan(mp=2, pp=1))["remarks"] == []
    mixed = Settings(cluster="1x4:A100-80G+1x4:V100-32G", search_space={"pp": 2, "recompute": "none", "schedule": "1F1B"})
    for level, hint in (("o1", "level o3 gives each kind as many layers"), ("o2", "level o3 also tries"), ("o3", "level")):
        settings = dataclasses.replace(mixed, level=level)
        made = tune_graph(config_graph(GPT, 16), Request(settings, precision="fp16", global_batch=16))
        assert any(hint in line for line in reasons(made)["remarks"]) == (level != "o3")


def test_a_plan_that_is_simpler_than_faster_ones_says_so():
    made = plan(mp=2, pp=1)
    faster = {**made.candidates[0], "step_time_s": made.estimate.step_time_s * 0.997}
    found = reasons(dataclasses.replace(made, candidates=(*made.candidates, faster)))["remarks"]
    assert found == ["simpler than 1 candidate predicted to be faster by up to 0.30%, less than the estimate can resolve"]


def test_nothing_takes_time_that_takes_none():
    made = plan(mp=1, pp=1)
    assert "mp communication" not in made.explain() and "batch communication" in made.explain()
    residue = dataclasses.replace(made.estimate, time={**made.estimate.time, "residue": 1e-19})
    assert "residue" not in dataclasses.replace(made, estimate=residue).explain()


def weight(name, shape, *readers):
    words = f"{name} {shape}, read by {', '.join(readers)}"
    return {"name": name, "kind": "no_pattern", "reason": words, "shape": shape, "readers": list(readers)}


def test_weights_of_repeated_layers_that_nothing_matches_are_one_line():
    unmatched = [
        weight(f"layers.{i}.{name}.weight", [64, 128], f"matmul_{9 * i + j}") for i in range(3) for j, name in enumerate("ab")
    ]
    lines = group_unmatched([*unmatched, weight("head.weight", [64, 512], "matmul_30", "transpose_2")])
    assert lines == [
        "3 x layers.0.a.weight to layers.2.a.weight [64, 128], read by matmul",
        "3 x layers.0.b.weight to layers.2.b.weight [64, 128], read by matmul",
        "head.weight [64, 512], read by matmul_30, transpose_2",
    ]
    made = dataclasses.replace(plan(mp=2, pp=1), unmatched=tuple(unmatched))
    assert "3 x layers.0.a.weight to layers.2.a.weight" in made.explain()


def test_rejected_candidates_are_grouped_by_reason_and_counted():
    made = plan(pp=1)
    text, groups = made.explain(), group_rejected(made.rejected)
    assert text.count("Rejected: ways") == 1
    assert all(group.how_many in text for group in groups)
    assert sum(group.count for group in groups) == len(made.rejected)
    assert any("search_space allows pp 1 only" in group.reason for group in groups)


def short_of_memory(mp, missing, count=0):
    limit = 72 * 2**30
    why = reason("memory", missing_bytes=missing, peak_bytes=limit + missing, limit_bytes=limit, device="A100-80G")
    return Rejected({"pp": 1, "dp": 1, "mp": mp}, why, count).to_dict()


TOO_FEW_LAYERS = Rejected({"pp": 8, "dp": 1, "mp": 1}, reason("layers", pp=8, layers=4)).to_dict()


def test_candidates_that_do_not_fit_are_told_from_ways_that_are_ruled_out():
    entries = [*(short_of_memory(n, 2**30, count=10 * n) for n in (1, 2)), TOO_FEW_LAYERS]
    assert [group.how_many for group in group_rejected(entries)] == ["30 candidates of 2 ways", "1 way"]


def test_a_group_shows_the_candidate_that_came_nearest():
    first, second = group_rejected([*(short_of_memory(n, n * 2**30) for n in (40, 3, 7)), TOO_FEW_LAYERS])
    assert (first.kind, first.count, first.candidate["mp"]) == ("memory", 3, 3)
    assert first.reason == "needs 75.0 GiB, 3.00 GiB more than the 72.0 GiB that A100-80G has less its reserve"
    assert (second.kind, second.count) == ("layers", 1)


def test_the_nearest_is_told_whatever_the_unit_of_its_miss():
    (group,) = group_rejected(
        [short_of_memory(1, 1.2 * 2**30), short_of_memory(2, 12.3 * 2**10), short_of_memory(3, 3 * 2**20)]
    )
    assert (group.count, group.candidate["mp"]) == (3, 2) and "12.3 KiB more" in group.reason


def test_reasons_of_one_kind_about_different_things_are_not_alike():
    entries = [Rejected({"pp": 1, "dp": 1, "mp": n}, reason("axis", axis=axis)).to_dict() for n, axis in ((2, "mp"), (1, "ep"))]
    assert len(group_rejected(entries)) == 2


def test_a_plan_of_schema_1_still_explains_itself():
    data = plan(pp=1).to_dict()
    data["schema"], data["unmatched"] = 1, ["head.weight [64, 128], read by matmul_9"]
    data["rejected"] = [{"candidate": r["candidate"], "reason": r["reason"]} for r in data["rejected"]]
    old = Plan.from_dict(data)
    assert old.schema == 2 and "search_space allows pp 1 only" in old.explain()
    assert "Matched by no pattern\n  head.weight [64, 128], read by matmul_9" in old.explain()
    assert Plan.from_dict(old.to_dict()) == old


def test_patterns_are_named_with_distribution_and_version():
    assert "4 matches, paddle-rbt-plugin 0.1.0" in plan(mp=2, pp=1).explain()


def test_what_matched_nothing_and_notes_are_told():
    made = dataclasses.replace(
        plan(mp=2, pp=1), unmatched=(weight("head.weight", [64, 128], "matmul_9"),), notes=("take care",)
    )
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
