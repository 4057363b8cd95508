"""Mixtures of experts on the axis ``ep``: what is legal, what is exchanged, what the plan says, and what it computes."""

from __future__ import annotations

from collections import Counter
from functools import cache

import paddle
import pytest
from launching import launch
from paddle.nn import functional as F
from zoo import ZOO, graph
from zoo.llama import Llama
from zoo.mixtral import EXPERTS, Experts
from zoo.parts import HIDDEN, GatedFeedForward, linear

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.cluster import ProcessMesh, parse_cluster
from paddle_rbt_plugin.cost.candidate import Training
from paddle_rbt_plugin.cost.model import CostModelAdapter, PluginCostModel
from paddle_rbt_plugin.handover.pir.partitioning import partition
from paddle_rbt_plugin.handover.pir.prediction import predicted
from paddle_rbt_plugin.handover.pir.replay import annotate
from paddle_rbt_plugin.handover.pir.structure import compare
from paddle_rbt_plugin.handover.pir.trace import trace_layer
from paddle_rbt_plugin.handover.pir.verification import handed_over
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import Analysis, Search, SearchSpace, analyse, candidates, run_level

MIXTURES = pytest.mark.parametrize("name", ["Mixtral", "GShard"])
GATHERS_BEFORE = pytest.mark.skipif(
    paddle.__version__ < "3.3",
    reason="Paddle's rules gather the experts' products here before 3.3, and completion follows them",
)
DP4 = ProcessMesh(("dp",), (4,), tuple(range(4)), experts="dp")
DP2_MP2 = ProcessMesh(("dp", "mp"), (2, 2), tuple(range(4)), experts="dp")


@cache
def analysis(name: str) -> Analysis:
    return analyse(graph(name), load_plugins().patterns)


def tuned(name: str, devices: int = 4, **space) -> rbt.Plan:
    model = ZOO[name]
    return rbt.tune(model.build(), input_spec=model.spec, cluster=f"1x{devices}:A100-80G", search_space=space)


def experts_of(found: Analysis) -> list:
    return [t for t in found.graph.params if t.ndim == 3]


@MIXTURES
@pytest.mark.parametrize("mesh", [DP4, DP2_MP2], ids=["dp4", "dp2 x mp2"])
def test_the_ranks_of_dp_hold_different_experts_and_reduce_no_gradient_of_theirs(name, mesh):
    found = analysis(name)
    completion = found.complete(mesh)
    assert not found.lost_sharding(completion)
    assert len(experts_of(found)) == 6
    assert all(completion.placements[t.index].dims_mapping[0] == 0 for t in experts_of(found))
    reduced = {sync.value.shape for work in completion.work for sync in work.gradient_syncs if sync.axis == "dp"}
    assert reduced and not any(len(shape) == 3 for shape in reduced)


@GATHERS_BEFORE
def test_tokens_go_to_their_experts_and_back_by_all_to_all():
    found = analysis("GShard")
    blocks = [w for w, s in zip(found.complete(DP4).work, found.layers.segments, strict=True) if s.is_block]
    exchanged = Counter(c.kind for w in blocks for kernel in w.forward for c in kernel.collectives)
    assert exchanged == {"all_to_all": 2 * len(blocks)}


@GATHERS_BEFORE
def test_experts_broadcast_by_a_product_are_not_divided():
    """Paddle divides the gradient of the operand of size 1, which cannot be."""

    class Broadcast(Experts):
        def __init__(self):
            super().__init__()
            self.before = linear(HIDDEN, HIDDEN)

        def forward(self, x):
            h = paddle.reshape(self.before(x), [-1, HIDDEN]).unsqueeze(0)
            return paddle.mean(paddle.sum(self.experts(h), axis=0))

    spec = [paddle.static.InputSpec([4, 16, HIDDEN], "float32", "x")]
    found = analyse(trace_layer(Broadcast(), spec).graph, load_plugins().patterns)
    assert "of size 1, along dp 4" in str(found.lost_sharding(found.complete(DP4)))


def test_the_plan_divides_experts_and_says_so():
    plan = tuned("Mixtral", ep=4)
    assert plan.degrees == {"pp": 1, "dp": 4, "mp": 1} and plan.ep == 4
    weights = [t for t in plan.tensors.values() if t.kind == "param" and len(t.shape) == 3]
    assert {t.dims_mapping for t in weights} == {(0, -1, -1)}
    assert plan.estimate.time["ep_communication"] > 0 == plan.estimate.time["mp_communication"]
    text = plan.explain()
    assert "pp 1 x dp 4 x mp 1, ep 4" in text and "ep 4: the ranks of dp hold different experts" in text
    assert rbt.Plan.from_dict(plan.to_dict()) == plan


def test_a_plan_of_whole_experts_holds_them_on_every_rank():
    divided, whole = (tuned("Mixtral", dp=4, ep=ep, sharding_stage=0) for ep in (4, 1))
    assert "ep_communication" not in whole.estimate.time
    expert_bytes = sum(t.nbytes for t in experts_of(analysis("Mixtral")))
    saved = whole.estimate.memory["parameters"] - divided.estimate.memory["parameters"]
    assert saved == expert_bytes * (1 - 1 / 4)


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        ({"ep": 3}, "ep 3 is neither 1 nor dp 4"),
        ({"ep": 8, "dp": 8}, f"ep 8 does not divide the {EXPERTS} experts"),
        ({"ep": 4, "sharding_stage": 1}, "experts are divided without ZeRO"),
    ],
)
def test_what_rules_a_degree_out_is_said(space, reason):
    model = ZOO["Mixtral"]
    spec = [paddle.static.InputSpec([8, *s.shape[1:]], s.dtype, s.name) for s in model.spec]
    with pytest.raises(rbt.NoFeasiblePlan, match=reason):
        rbt.tune(model.build(), input_spec=spec, cluster="1x8:A100-80G", search_space=space)


def test_a_model_without_experts_has_one_way_only():
    plan = tuned("GPT-2")
    assert plan.ep == 1 and all(c["ep"] == 1 for c in plan.candidates)
    assert not any("ep" in r["candidate"] and r["candidate"]["ep"] > 1 for r in plan.rejected)
    with pytest.raises(rbt.NoFeasiblePlan, match="no pattern that matched shards anything along ep"):
        tuned("GPT-2", ep=4)


@MIXTURES
@pytest.mark.parametrize("mesh", [DP4, DP2_MP2], ids=["dp4", "dp2 x mp2"])
def test_the_handed_over_program_communicates_as_predicted(name, mesh):
    trace = trace_layer(ZOO[name].build(), ZOO[name].spec)
    found = analyse(trace.graph, load_plugins().patterns)
    program = trace.program.clone()
    annotate(program, mesh, {t.name: found.placement(t, mesh) for t in trace.graph.tensors if t.kind != "var"})
    assert not compare(predicted(found.graph, found.complete(mesh)), handed_over(partition(program), mesh))


class AgainstExperts(rbt.CostModel):
    """Predicts divided experts to take a hundred times as long."""

    name = "against_experts"

    def estimate(self, case):
        return rbt.Prediction(case.analytic.step_time_s * (100 if case.candidate.ep > 1 else 1))


def test_a_cost_model_without_bounds_compares_whole_and_divided_experts_of_the_same_degrees(monkeypatch):
    found, cluster, training = analysis("Mixtral"), parse_cluster("1x4:A100-80G"), Training(8)
    judge = CostModelAdapter(PluginCostModel(AgainstExperts), found.graph, cluster, training)
    search = Search(found, cluster, training, SearchSpace.parse({"sharding_stage": 0}), judge=judge)
    monkeypatch.setattr("paddle_rbt_plugin.search.o1.KEPT", 1)
    shown = [(e.candidate.dp, e.candidate.ep) for e in run_level(search, "o1").feasible]
    assert shown[0][1] == 1 and {(4, 1), (4, 4)} <= set(shown)


@pytest.mark.parametrize("cluster", ["1x4:A100-80G", "2x4:V100-32G"])
def test_bounds_hold_for_divided_experts(cluster):
    found = analysis("Mixtral")
    search = Search(found, parse_cluster(cluster), Training(8), SearchSpace.parse({"schedule": "auto"}))
    divided = [c for c in candidates(found, search.cluster, search.training, search.space)[0] if c.ep > 1]
    assert divided and all(c.ep == c.dp and c.sharding_stage == 0 for c in divided)
    for candidate in divided[::3]:
        bound = search.bound(candidate)
        exact = search.evaluate(candidate).estimate
        assert bound.step_time_s <= exact.step_time_s
        assert bound.peak_memory_bytes == pytest.approx(exact.peak_memory_bytes)


class ListedExperts(paddle.nn.Layer):
    """Experts that are Layers of their own, each of which sees every token."""

    def __init__(self):
        super().__init__()
        self.router = linear(HIDDEN, EXPERTS, bias=False)
        self.each = paddle.nn.LayerList([GatedFeedForward(F.silu) for _ in range(EXPERTS)])

    def forward(self, x):
        scores = F.softmax(self.router(x))
        best, _ = paddle.topk(scores, 2, axis=-1)
        kept = paddle.where(scores >= best[..., -1:], scores, paddle.zeros_like(scores))
        return sum(kept[..., i : i + 1] * expert(x) for i, expert in enumerate(self.each))


def test_experts_that_are_layers_of_their_own_are_recommended_to_be_stacked():
    model = Llama(ffn=ListedExperts)
    plan = rbt.tune(model, input_spec=ZOO["Mixtral"].spec, cluster="1x2:A100-80G", search_space={"mp": 2})
    assert any(f"the {EXPERTS} experts of a layer have weights of their own" in note for note in plan.notes)
    assert not any("experts" in note for note in tuned("Mixtral", dp=4).notes)


def test_stacked_experts_in_layers_that_differ_are_not_taken_for_layers_of_their_own():
    class DenseFirst(Llama):
        def __init__(self):
            super().__init__(layers=4, ffn=Experts)
            self.blocks[0].ffn = GatedFeedForward(F.silu)

    plan = rbt.tune(DenseFirst(), input_spec=ZOO["Mixtral"].spec, cluster="1x2:A100-80G", search_space={"mp": 2})
    assert not any("experts" in note for note in plan.notes)


def test_layers_of_their_own_may_divide_experts_differently():
    model = ZOO["Mixtral"]
    plan = rbt.tune(model.build(), input_spec=model.spec, cluster="1x4:A100-80G", search_space={"ep": [2, 4]}, level="o2")
    assert plan.ep == plan.degrees["dp"] > 1


@pytest.mark.slow
@MIXTURES
def test_training_with_divided_experts_gives_the_serial_loss(name, tmp_path):
    losses = launch("zoo_static.py", 2, tmp_path / "losses.json", name, '{"dp": [2], "ep": [2]}')
    assert losses["parallel"] == pytest.approx(losses["serial"], abs=1e-5)
    assert losses["serial"][-1] != pytest.approx(losses["serial"][0], abs=1e-4), "three steps must change the loss"
