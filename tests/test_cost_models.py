"""Cost models of plugins: chosen by name, they rank the candidates; what goes wrong in them names their package."""

from __future__ import annotations

from fractions import Fraction
from typing import ClassVar

import numpy
import pytest
from paddle.static import InputSpec
from searching import search_of

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.cost.estimates import RESOLUTION
from paddle_rbt_plugin.cost.model import CostModelAdapter, PluginCostModel
from paddle_rbt_plugin.errors import CostModelError, NoFeasiblePlan
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import run_level, unpruned
from paddle_rbt_plugin.search.space import candidates
from paddle_rbt_plugin.search.state import Search

MODEL = """
from paddle_rbt_plugin import CostModel, Prediction, hookimpl

class LikesDataParallelism(CostModel):
    name = "acme"
    def estimate(self, case):
        return Prediction(case.analytic.step_time_s / case.candidate.dp ** 3)

@hookimpl
def register_cost_models(register):
    register(LikesDataParallelism)
"""
ANSWER = "Prediction(case.analytic.step_time_s / case.candidate.dp ** 3)"


class Recorder(rbt.CostModel):
    """Prefers the slowest candidate of the analytic model, and remembers what it was asked."""

    name = "recorder"
    made: ClassVar[list] = []

    def __init__(self, graph, cluster, training):
        self.asked = []
        self.made.append(self)

    def estimate(self, case):
        self.asked.append(case.candidate)
        return rbt.Prediction(1.0 / case.analytic.step_time_s, time={"all": 1.0})


class Hungry(Recorder):
    """Says that everything needs three quarters of what the analytic model says, plus a GiB per micro batch."""

    name = "hungry"
    predicts_memory = True

    def estimate(self, case):
        peak = 0.75 * case.analytic.peak_memory_bytes + case.candidate.micro_batch * 2**30
        return rbt.Prediction(case.analytic.step_time_s, peak)


def searching(model, cluster="1x8:A100-80G", **space):
    search = search_of(cluster, **space)
    judge = CostModelAdapter(
        PluginCostModel(model, "acme", "1.2", "m = acme_m"), search.analysis.graph, search.cluster, search.training
    )
    return Search(search.analysis, search.cluster, search.training, search.space, judge=judge)


@pytest.fixture
def model(install):
    def install_model(source=MODEL):
        install("acme-models", {"m": "acme_m"}, acme_m=source)

    return install_model


def tune(**settings):
    import paddle

    class Block(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.up, self.down = paddle.nn.Linear(64, 256), paddle.nn.Linear(256, 64)

        def forward(self, x):
            return paddle.mean(self.down(paddle.nn.functional.gelu(self.up(x))))

    spec = [InputSpec([8, 16, 64], "float32", "x")]
    return rbt.tune(Block(), input_spec=spec, cluster="1x4:A100-80G", **settings)


def test_the_plan_is_the_one_that_the_named_model_prefers_and_says_so(model, tmp_path):
    model()
    usual, theirs = tune(), tune(cost_model="acme", save_path=str(tmp_path / "plan.json"))
    assert usual.cost_model == {"name": "analytic", "distribution": "paddle-rbt-plugin", "version": usual.cost_model["version"]}
    assert usual.degrees["dp"] < theirs.degrees["dp"] == 4
    assert theirs.cost_model == {"name": "acme", "distribution": "acme-models", "version": "1.2"}
    assert rbt.Plan.load(tmp_path / "plan.json").cost_model == theirs.cost_model
    assert "acme of acme-models 1.2" in theirs.explain()
    times = [c["step_time_s"] for c in theirs.candidates]
    assert times == sorted(times) and times[0] == theirs.estimate.step_time_s


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ("1 / 0", "failed on pp .*: ZeroDivisionError: division by zero"),
        ("exit()", "failed on pp .*: SystemExit"),
        ("None", "answers None for pp .*; a Prediction would be right"),
        ("Prediction(float('nan'))", "answers a step time of nan for pp .*; a finite number of seconds above 0"),
        ("Prediction(-1.0)", "answers a step time of -1.0"),
        ("Prediction(0)", "answers a step time of 0 "),
        ("Prediction('1 s')", "answers a step time of '1 s'"),
        ("Prediction(1.0, 2e9)", "answers a peak memory .*; None, or predicts_memory = True"),
        ("Prediction(1.0, time={'forward': float('nan')})", "answers the breakdown"),
        ("Prediction(1.0, time={'forward': -1.0})", "answers the breakdown {'forward': -1.0} .*finite seconds, none below 0"),
        ("Prediction(1.0, time={'forward': '1'})", "answers the breakdown"),
        ("Prediction(1.0, time={'for\\x1bward': 1.0})", "answers the breakdown .*printable names"),
        ("Prediction(1.0, time=[1.0])", "answers the breakdown"),
        ("Prediction(10**400)", r"answers a step time of 10+\.\.\.0+ for pp .*; a finite number of seconds above 0"),
        ("Prediction(10**5000)", "answers a step time of "),
        ("Prediction(1e-320)", "answers a step time of 1e-320 for pp .*; a number of seconds of at least 1e-12"),
    ],
)
def test_a_model_that_raises_or_answers_nonsense_is_reported_with_its_package(model, answer, cause):
    model(MODEL.replace(ANSWER, answer))
    with pytest.raises(CostModelError, match=rf"cost model 'acme' \(acme-models 1.2, entry point 'm = acme_m'\) {cause}"):
        tune(cost_model="acme")


@pytest.mark.parametrize("peak", ["None", "float('inf')", "-5"])
def test_a_model_that_predicts_memory_must_always_do_so(model, peak):
    model(
        MODEL.replace(ANSWER, f"Prediction(1.0, {peak})").replace(
            '    name = "acme"', '    name = "acme"; predicts_memory = True'
        )
    )
    with pytest.raises(CostModelError, match="answers a peak memory of"):
        tune(cost_model="acme")


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("raise RuntimeError('no table')", "failed to start: RuntimeError: no table"),
        ("exit(0)", "failed to start: SystemExit: 0"),
    ],
)
def test_a_model_that_cannot_start_is_reported_with_its_package(model, body, cause):
    model(MODEL.replace("    def estimate", f"    def __init__(self, graph, cluster, training): {body}\n    def estimate"))
    with pytest.raises(CostModelError, match=rf"'acme' \(acme-models 1.2, .*\) {cause}"):
        tune(cost_model="acme")


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ("(CostModel):", ":", "PatternError: register.. takes a subclass of CostModel"),
        ("def estimate", "def estimat", "PatternError: cost model 'acme' predicts nothing"),
        ('name = "acme"', 'name = "analytic"', "already taken by a cost model of paddle-rbt-plugin"),
        ('name = "acme"', "name = ''", "needs a name of letters"),
        ('name = "acme"', 'name = "acme"; bounded = 1', "cost model 'acme': bounded is True or False, not 1"),
        ('name = "acme"', 'name = "acme"; resolution = 1', "resolution is a number from 0 to less than 1, not 1"),
    ],
)
def test_a_malformed_model_is_left_out_with_the_cause(model, old, new, cause):
    model(MODEL.replace(old, new))
    with pytest.warns(UserWarning, match=f"of acme-models 1.2 is left out: .*{cause}"):
        plugins = load_plugins()
    assert plugins.cost_model("analytic").distribution == "paddle-rbt-plugin"


def test_a_broken_or_unknown_model_asked_for_by_name_is_an_error(model):
    with pytest.raises(CostModelError, match="no plugin gives a cost model named 'analytik'; did you mean 'analytic'"):
        tune(cost_model="analytik")
    model(MODEL.replace("def estimate", "def estimat"))
    with (
        pytest.warns(UserWarning),
        pytest.raises(CostModelError, match=r"'acme' \(acme-models 1.2.*\) is broken: .*predicts nothing"),
    ):
        tune(cost_model="acme")


def test_blocking_this_package_leaves_its_cost_models():
    assert set(load_plugins(["paddle-rbt-plugin"]).cost_models) == {"analytic", "paddle"}


def test_a_model_without_bounds_is_asked_about_every_candidate_and_ranks_them():
    search = searching(Recorder)
    result = run_level(search, "o1")
    every, _ = candidates(search.analysis, search.cluster, search.training, search.space)
    asked = Recorder.made[-1].asked
    assert len(asked) == len(set(asked)) == len(every)
    assert result.best.estimate.step_time_s == pytest.approx(1 / slowest("1x8:A100-80G", every))
    assert result.best.estimate.time == {"all": 1.0}
    assert any(f"was asked about all {len(every)} candidates" in str(note) for note in result.notes)


def test_beyond_a_number_the_analytic_model_chooses_whom_to_ask_of_each_way_to_use_the_devices(monkeypatch):
    monkeypatch.setattr(unpruned, "MOST_ASKED", 40)
    search = searching(Recorder)
    result = run_level(search, "o1")
    asked = Recorder.made[-1].asked
    every, _ = candidates(search.analysis, search.cluster, search.training, search.space)
    degrees = {(c.pp, c.dp, c.mp) for c in every}
    assert {(c.pp, c.dp, c.mp) for c in asked} == degrees and len(asked) <= 40
    assert any(f"was asked about {len(asked)} of the {len(every)} candidates" in str(note) for note in result.notes)


def test_a_model_with_bounds_of_the_analytic_one_finds_the_same_plan_as_it():
    class Plus(rbt.CostModel):
        name, bounded, resolution = "plus", True, RESOLUTION

        def estimate(self, case):
            return rbt.Prediction(case.analytic.step_time_s + 1e-6)

    search = searching(Plus)
    best, usual = run_level(search, "o1").best, run_level(search_of("1x8:A100-80G"), "o1").best
    assert best.candidate == usual.candidate
    assert best.estimate.step_time_s == usual.estimate.step_time_s + 1e-6


def test_a_bounded_model_that_undercuts_the_analytic_one_is_an_error():
    class Under(rbt.CostModel):
        name, bounded = "under", True

        def estimate(self, case):
            return rbt.Prediction(case.analytic.step_time_s * 0.99)

    with pytest.raises(CostModelError, match=r"'under' .* below the .* of the analytic model, although it is bounded"):
        run_level(searching(Under), "o1")


def test_numbers_of_other_classes_become_plain_ones():
    class Exact(rbt.CostModel):
        name = "exact"

        def estimate(self, case):
            return rbt.Prediction(Fraction(1, 4), time={"a": numpy.float32(0.125), "b": Fraction(1, 8)})

    estimate = run_level(searching(Exact), "o1").best.estimate
    assert repr((estimate.step_time_s, estimate.time)) == "(0.25, {'a': 0.125, 'b': 0.125})"


def test_a_model_that_predicts_memory_decides_what_fits():
    roomy = searching(Hungry, cluster="1x2:A100-80G", micro_batch=[1])
    assert run_level(roomy, "o1").best.estimate.memory == {}
    with pytest.raises(NoFeasiblePlan, match=r"the nearest candidate, .* GiB more than"):
        run_level(searching(Hungry, cluster="1x2:V100-16G", micro_batch=[24], dp=1), "o1")


@pytest.mark.parametrize("level", ["o2", "o3"])
def test_higher_levels_rank_by_the_model_too(level):
    search = searching(Recorder, cluster="1x2:A100-80G+1x2:V100-32G", accumulate_steps=[2])
    made = len(Recorder.made)
    result = run_level(search, level)
    asked = [candidate for model in Recorder.made[made - 1 :] for candidate in model.asked]
    assert result.best.estimate.step_time_s <= 1 / slowest(search.cluster, asked) * 1.001
    assert result.feasible[0] == result.best


def test_of_plans_that_a_model_cannot_tell_apart_the_simplest_wins():
    class Blind(rbt.CostModel):
        name = "blind"

        def estimate(self, case):
            return rbt.Prediction(1.0 + 0.04 * (case.candidate.sharding_stage == 0))

    Blind.resolution = 0.0
    assert run_level(searching(Blind), "o1").best.candidate.sharding_stage > 0
    Blind.resolution = 0.05
    best = run_level(searching(Blind), "o1").best.candidate
    assert (best.pp, best.mp, best.sharding_stage, best.recompute) == (1, 1, 0, "none")


def slowest(cluster, candidates):
    """Step time of the slowest of the candidates by the analytic model, in seconds."""
    search = search_of(cluster)
    return max(search.evaluate(c).estimate.step_time_s for c in candidates)


def test_one_instance_serves_one_search():
    made = len(Recorder.made)
    search = searching(Recorder)
    searching(Recorder)
    search.judge.on(search.cluster)
    assert len(Recorder.made) == made + 3
