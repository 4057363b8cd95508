"""The test kit for authors of patterns."""

from __future__ import annotations

import subprocess
import sys

import paddle
import pytest
from kit_models import SPEC, Siren, TwoLayers, ones, rank_dependent, siren, with_loss
from paddle.nn import functional as F
from small import traced_gpt

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.testing import (
    assert_consistent,
    assert_matches,
    assert_same_loss,
    compare_losses,
    inconsistencies,
    match_pattern,
)


def lazy(**how):
    with paddle.LazyGuard():
        return Siren(**how)


def test_matches_are_counted_with_their_tensors():
    report = assert_matches(TwoLayers, lazy(), SPEC, count=2)
    assert [t["up"].structured_name for t in report.tensors] == ["up.0.weight", "up.1.weight"]
    assert report.matches[1].specs[report.tensors[1]["down"].index] == ("mp", None)


def test_another_number_of_matches_is_an_assertion_with_the_report():
    with pytest.raises(AssertionError, match=r"expected 3 matches\nkit_two_layers matches 2 times\n  x = "):
        assert_matches(TwoLayers, lazy(), SPEC, count=3)


def test_a_look_alike_fails_with_the_first_op_that_does_not_fit():
    assert_matches(TwoLayers, lazy(activation=F.gelu), SPEC, count=0)
    with pytest.raises(AssertionError, match=r"sin\(the result of add\)\n.*nearest: gelu_0.*\n.*it is gelu, not sin"):
        assert_matches(TwoLayers, lazy(activation=F.gelu), SPEC, count=2)


def test_a_pattern_may_be_named_and_a_model_be_a_graph_a_program_or_a_name():
    trace = traced_gpt()
    for model in (trace.graph, trace.program, "gpt3-1.3b"):
        report = match_pattern("ffn", model)
        assert report.count == (24 if isinstance(model, str) else 2)
    with pytest.raises(rbt.TunerError, match="not int"):
        match_pattern("ffn", 5)
    with pytest.raises(rbt.TunerError, match="give input_spec"):
        match_pattern("ffn", lazy())


def test_a_pattern_alone_meets_no_other():
    assert {m.pattern for m in match_pattern("ffn", traced_gpt().graph, alone=True).result.matches} == {"ffn"}


def test_shardings_that_fit_are_consistent():
    assert_consistent(TwoLayers, lazy(), SPEC, degrees={"dp": 4, "mp": 8})


def changed(**fields):
    return type("Changed", (TwoLayers,), fields)


@pytest.mark.parametrize(
    ("pattern", "how", "problem"),
    [
        (TwoLayers, {"degrees": {"mp": 3}}, r"mp 3 does not divide the 64 dim 1 of up .*legal: 1, 2, 4"),
        (TwoLayers, {"degrees": {"dp": 3, "mp": 1}}, "dp 3 does not divide the batch of 4"),
        (
            changed(shard={"up": (None, "mp"), "up_bias": ("mp",), "down": ("mp", None)}),
            {},
            r"down.0.bias \[32\], which add_1 reads, is claimed by no pattern",
        ),
        (changed(shard={**TwoLayers.shard, "x": ("dp", "mp", None)}), {}, "a match is dropped|Paddle's completion gives it up"),
        (changed(build=lambda self, g: g.op("gelu", g.tensor("x")), shard={"x": (...,)}), {}, "the model has no gelu"),
    ],
)
def test_what_speaks_against_shardings_is_found(pattern, how, problem):
    found = inconsistencies(pattern, lazy(), SPEC, **how)
    with pytest.raises(AssertionError, match=problem):
        assert_consistent(pattern, lazy(), SPEC, **how)
    assert found


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"degrees": {}}, r"whole numbers of at least 1 by axis, such as .*, not \{\}"),
        ({"degrees": [("mp", 2)]}, "by axis, such as"),
        ({"degrees": {"mp": 0}}, "mp cannot be 0"),
        ({"degrees": {"mp": -2}}, "mp cannot be -2"),
        ({"degrees": {"mp": "2"}}, "mp cannot be '2'"),
        ({"degrees": {"mp": 2.0}}, "mp cannot be 2.0"),
        ({"degrees": {"tp": 2}}, "unknown axis 'tp'; patterns shard along dp, mp"),
        ({"displaces": {"fffn"}}, "displaces: no pattern is named 'fffn'; did you mean 'ffn'"),
        ({"displaces": "ffn"}, "displaces is a set of names, not 'ffn'"),
        ({"whole": {"up.0.wieght"}}, "whole: no parameter of the model is named 'up.0.wieght'; did you mean 'up.0.weight'"),
    ],
)
def test_a_question_about_consistency_that_makes_no_sense_is_an_error(how, message):
    with pytest.raises(rbt.TunerError, match=message):
        assert_consistent(TwoLayers, lazy(), SPEC, **how)


def test_conflicts_with_other_patterns_are_found_in_both_directions():
    class Rival(rbt.Pattern):
        name = "kit_rival"

        def build(self, g):
            g.linear(g.tensor("x"), g.param("up_weight", ndim=2))

        shard = {"up_weight": ("mp", None)}

    graph = traced_gpt().graph
    (problem, *_) = inconsistencies(Rival, graph)
    assert "a match is dropped: claims" in problem
    strong = type("Strong", (Rival,), {"priority": 9})
    assert any("a match of ffn gives way to it" in p for p in inconsistencies(strong, graph))
    assert not any("a match of ffn" in p for p in inconsistencies(strong, graph, displaces={"ffn", "qkv"}))


@pytest.mark.slow
def test_training_under_a_pattern_gives_the_loss_of_one_process():
    found = assert_same_loss(siren, TwoLayers)
    assert found.plan.degrees == {"pp": 1, "dp": 1, "mp": 2}
    assert found.plan.patterns["kit_two_layers"]["matches"] == 2
    assert len(set(found.serial)) == 3, "training changes the loss"


@pytest.mark.slow
def test_loss_and_batches_may_be_given():
    found = assert_same_loss(with_loss, TwoLayers, batches=ones, search_space={"dp": 2, "mp": 1}, steps=2)
    assert len(found.distributed) == 2


@pytest.mark.slow
def test_losses_that_differ_are_an_assertion_that_shows_them():
    with pytest.raises(AssertionError, match=r"they differ by .*\nlosses under pp 1 x dp 1 x mp 2\n  step 0: .* alone, "):
        assert_same_loss(rank_dependent, TwoLayers, steps=1)


def test_a_pattern_that_takes_no_part_in_the_plan_is_an_assertion():
    unfit = changed(name="kit_unfit", build=lambda self, g: g.op("gelu", g.tensor("x")), shard={"x": ("dp", ...)})
    with pytest.raises(AssertionError, match=r"kit_unfit takes no part in the plan.*\n.*matches 0 times"):
        compare_losses(siren, unfit)


def test_a_pattern_whose_build_exits_is_an_error():
    def leave(self, g):
        raise SystemExit(0)

    with pytest.raises(rbt.PatternError, match=r"pattern 'kit_two_layers': build\(\) raised SystemExit: 0"):
        match_pattern(changed(build=leave), lazy(), SPEC)


SCRIPT = """
import paddle
from paddle_rbt_plugin.testing import compare_losses

def build():
    return paddle.nn.Linear(8, 8), [paddle.static.InputSpec([4, 8], "float32", "x")], lambda y: y.mean()

compare_losses(build, search_space={"dp": 2, "mp": 1}, steps=1, timeout=100)
"""


def test_a_call_in_a_worker_is_an_error_before_anything_starts(monkeypatch):
    monkeypatch.setenv("PADDLE_RBT_WORKER", "1")
    with pytest.raises(rbt.TunerError, match=r"called again inside a worker.* put the call under if __name__ == '__main__'"):
        compare_losses(siren, TwoLayers)


@pytest.mark.slow
def test_a_script_without_a_guard_ends_with_advice(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert "put the call under if __name__ == '__main__'" in done.stderr.splitlines()[-1]


def test_a_function_that_other_processes_cannot_find_is_an_error():
    with pytest.raises(rbt.TunerError, match="must be a function at the top of a module"):
        compare_losses(lambda: None, TwoLayers)
