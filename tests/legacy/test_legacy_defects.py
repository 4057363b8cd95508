"""What users of Paddle's own rule-based tuner met on legacy programs, and must not meet here. Where a defect belongs to the
reader, the zoo, the engine or the partition it has its test there, and the one about PIR in ``tests/test_legacy.py``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import paddle
import pytest
from legacy_models import LegacyProgram, adamw, gpt, legacy_program, one_plan
from paddle import nn
from paddle.distributed.auto_parallel.static.process_group import get_process_group
from paddle.distributed.passes.pass_base import PassContext, new_pass
from paddle.static import InputSpec
from zoo import ZOO

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.cluster import parse_cluster
from paddle_rbt_plugin.cost.paddle import PaddleEstimate, RankCluster
from paddle_rbt_plugin.cost.paddle_memo import estimates_remembered
from paddle_rbt_plugin.graph.legacy import read_legacy_program
from paddle_rbt_plugin.handover.legacy.engine import check_runs_on_cpu, with_paths_of_job
from paddle_rbt_plugin.handover.legacy.judge import judge
from paddle_rbt_plugin.handover.legacy.partition import LegacyParallelizer


def judged(program: LegacyProgram, plan: rbt.Plan) -> PaddleEstimate:
    legacy = read_legacy_program(program.main, program.loss)
    return judge(program.main, program.startup, program.loss, adamw(), legacy, plan)


def test_two_machines_are_costed_by_rank() -> None:
    program = gpt(2, batch=16)
    estimate = judged(program, one_plan(program, "2x8:V100-32G", dp=16))
    assert estimate.step_time_s > 0 and estimate.peak_memory_bytes > 0
    ranks = RankCluster(parse_cluster("2x8:V100-32G"))
    assert ranks.cross_machine([7, 8]) and not ranks.cross_machine([8, 15])
    assert ranks.get_device(15).sp_gflops > 1000


def test_no_rank_outside_of_the_cluster_joins_the_world() -> None:
    program = gpt(2)
    plan = one_plan(program, "1x4:V100-32G", dp=4)
    LegacyParallelizer(program.main, program.startup, program.loss, adamw(), read_legacy_program(program.main), plan)
    assert sorted(get_process_group(0).ranks) == [0, 1, 2, 3]


def test_a_batch_that_does_not_divide_is_rejected_with_the_legal_degrees() -> None:
    program = gpt(2, batch=6)
    plan = rbt.tune(program.main, loss=program.loss, cluster="1x8:V100-32G")
    assert plan.degrees["dp"] in (1, 2)
    reasons = [r["reason"] for r in plan.rejected if r["candidate"]["dp"] == 8]
    assert reasons and "does not divide" in reasons[0]


def test_heads_that_do_not_divide_stay_whole_and_a_note_says_so() -> None:
    assert any("mp 8 does not divide the 4 attention heads" in note for note in one_plan(gpt(2, heads=4), mp=8).notes)


def test_a_vocabulary_that_does_not_divide_stays_whole_and_a_note_says_so() -> None:
    plan = one_plan(gpt(2, vocab=1001), "1x4:V100-32G", mp=4)
    assert any("mp 4 does not divide the 1001 vocabulary" in note for note in plan.notes)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(rbt.NoFeasiblePlan, match="pp 4 exceeds the 2 layers"):
        one_plan(gpt(2), "1x4:V100-32G", pp=4)


def test_every_op_of_a_llama_is_costed() -> None:
    model = ZOO["LLaMA-2"]
    program = legacy_program(model.build, model.spec)
    assert judged(program, one_plan(program, "1x2:V100-32G", mp=2)).step_time_s > 0


class HalfPrecision(nn.Layer):
    """A row parallel product in a dtype that the estimator's communication does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, y):
        h = nn.functional.gelu(self.up(x)).astype("bfloat16")
        h = paddle.matmul(h, self.down.weight.astype("bfloat16")).astype("float32")
        return (h - y).square().mean()


def test_communication_is_costed_in_every_dtype() -> None:
    program = legacy_program(HalfPrecision, [InputSpec([8, 4, 16], "float32", name) for name in ("x", "y")])
    assert judged(program, one_plan(program, "1x2:V100-32G", dp=2)).step_time_s > 0


class SplitAndJoin(nn.Layer):
    """A split whose gradient is a concat."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x, y):
        a, b = paddle.split(self.down(nn.functional.gelu(self.up(x))), 2, axis=-1)
        return (paddle.concat([b, a], axis=-1) + x - y).square().mean()


def test_split_and_concat_go_through_backward() -> None:
    program = legacy_program(SplitAndJoin, [InputSpec([8, 4, 16], "float32", name) for name in ("x", "y")])
    plan = one_plan(program, "1x2:V100-32G", mp=2)
    legacy = read_legacy_program(program.main, program.loss)
    chain = LegacyParallelizer(program.main, program.startup, program.loss, adamw(), legacy, plan)
    assert len(chain.rank(1).main.all_parameters()) == 4


def test_level_o2_cuts_three_and_more_stages() -> None:
    program = gpt(4)
    how = {"loss": program.loss, "cluster": "1x4:V100-32G", "level": "o2"}
    plan = rbt.tune(program.main, search_space={"pp": 4}, **how)
    assert [stage.layers for stage in plan.stages] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    legacy = read_legacy_program(program.main, program.loss)
    chain = LegacyParallelizer(program.main, program.startup, program.loss, adamw(), legacy, plan)
    sends = [op for op in chain.rank(2).main.global_block().ops if op.type == "send_v2"]
    assert len(sends) >= 2, "a stage in the middle sends to both sides"


@pytest.mark.parametrize(("name", "weights"), [("T5", "cross"), ("LLaMA-2", "SwiGLU")])
def test_cross_attention_and_swiglu_leave_no_projection_whole(name: str, weights: str) -> None:
    model = ZOO[name]
    program = legacy_program(model.build, model.spec)
    plan = one_plan(program, "1x2:V100-32G", mp=2)
    assert all("mp" in plan.placements(w).mesh.axes for w in plan.tensors)
    assert not [w for w in plan.unmatched if "linear" in w["name"]], f"{weights} projections that no pattern claims"


def test_parallel_blocks_that_share_an_input_keep_both_of_their_matches() -> None:
    model = ZOO["GPT-J"]
    program = legacy_program(model.build, model.spec)
    plan = one_plan(program, "1x2:V100-32G", mp=2)
    weights = [t for t in plan.tensors.values() if t.kind == "param" and len(t.dims_mapping) == 2 and max(t.dims_mapping) >= 0]
    of_a_block = Counter(t.pattern for t in weights)
    assert of_a_block["qkv"] == 3 * of_a_block["row_matmul"] and of_a_block["ffn"] == 2 * of_a_block["row_matmul"] > 0


def test_the_output_of_a_position_embedding_is_split_along_the_batch_only() -> None:
    program = gpt(2)
    plan = one_plan(program, dp=2, mp=4)
    out = next(t for t in plan.tensors.values() if t.pattern == "position_embedding" and t.kind == "var")
    assert out.dims_mapping == (0, -1, -1)


def test_a_plan_that_exceeds_the_memory_less_its_reserve_is_no_plan() -> None:
    program = gpt(2, hidden=256, ffn=1024, vocab=4096)
    with pytest.raises(rbt.NoFeasiblePlan, match="MiB more than"):
        rbt.tune(program.main, loss=program.loss, cluster="1x1:V100-16G", memory_reserve=0.999)


@pytest.mark.parametrize("cluster", ["1x1:V100-16G+1x1:V100-32G", "1x1:V100-32G+1x1:V100-16G"])
def test_every_stage_must_fit_its_own_device(cluster: str) -> None:
    program = gpt(4, hidden=256, ffn=1024, vocab=512)  # two stages that need about as much
    needed = one_plan(program, "1x2:V100-32G", pp=2, accumulate_steps=1).estimate.peak_memory_bytes
    reserve = 1 - 1.1 * needed / (32 * 2**30)  # leaves enough of 32 GiB, and too little of 16 GiB
    degrees = {"pp": 2, "dp": 1, "mp": 1}
    how = {"loss": program.loss, "search_space": degrees | {"accumulate_steps": 1}, "memory_reserve": reserve}
    assert rbt.tune(program.main, cluster="1x2:V100-32G", **how).degrees == degrees
    with pytest.raises(rbt.NoFeasiblePlan, match="V100-16G has less its reserve"):
        rbt.tune(program.main, cluster=cluster, **how)


def test_level_o3_is_accepted() -> None:
    program = gpt(2)
    plan = rbt.tune(program.main, loss=program.loss, cluster="1x1:V100-32G+1x1:A100-40G", level="o3")
    assert plan.level == "o3"


@pytest.mark.parametrize("cost_model", ["analytic", "paddle"])
def test_a_plan_is_saved_as_json_and_used_again(tmp_path: Path, cost_model: str) -> None:
    program, path = gpt(2), tmp_path / "plan.json"
    how = {"loss": program.loss, "cluster": "1x2:V100-32G"}
    plan = rbt.tune(program.main, save_path=str(path), cost_model=cost_model, **how)
    assert json.loads(path.read_text())["signature"] == plan.signature
    assert rbt.tune(gpt(2).main, cluster="1x2:V100-32G", load_path=str(path)).tensors == plan.tensors
    with pytest.raises(rbt.PlanError, match="another program"):
        rbt.tune(gpt(3).main, cluster="1x2:V100-32G", load_path=str(path))


def test_the_paths_of_the_job_configuration_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, config = tmp_path / "there.json", tmp_path / "config.json"
    there.write_text("{}")
    config.write_text(json.dumps({"tuner_save_path": "new.json", "tuner_load_path": str(there)}))
    monkeypatch.setenv("PADDLE_AUTO_PARALLEL_CONFIG", str(config))
    assert with_paths_of_job({"load_path": None}) == {"save_path": "new.json", "load_path": str(there)}
    assert with_paths_of_job({"save_path": "mine.json"})["save_path"] == "mine.json"
    there.unlink()
    assert "load_path" not in with_paths_of_job({})
    config.write_text("no json")
    with pytest.raises(rbt.TunerError, match="not a readable JSON object"):
        with_paths_of_job({})


def test_a_job_that_only_tunes_ends_in_a_documented_exception(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADDLE_AUTO_PARALLEL_STAGE", "tuner")
    made = engine(save_path=str(tmp_path / "plan.json"))
    with (
        rbt.legacy_static_ops(),
        pytest.raises(rbt.TuningFinished, match="it is saved in") as caught,
        pytest.warns(rbt.TunerWarning),
    ):
        made.prepare(*SPECS, mode="train")
    assert rbt.Plan.load(tmp_path / "plan.json").degrees == caught.value.plan.degrees


@pytest.mark.parametrize("level", ["o1", "o2", "o3"])
def test_what_is_reported_is_the_plan_itself(level: str) -> None:
    program = gpt(4)
    plan = rbt.tune(program.main, loss=program.loss, cluster="1x4:V100-32G", level=level)
    first = plan.candidates[0]
    assert {axis: first[axis] for axis in plan.degrees} == plan.degrees
    assert first["step_time_s"] == plan.estimate.step_time_s == min(c["step_time_s"] for c in plan.candidates)
    assert "None" not in plan.explain()


def engine(**tuning: Any) -> Any:
    """An engine of a layer that no pattern matches."""
    from paddle.distributed.fleet import auto

    strategy = auto.Strategy()
    for name, value in ({"enable": True, "pass_name": "rule_based_tuner"} | tuning).items():
        setattr(strategy.tuning, name, value)
    return auto.Engine(nn.Linear(16, 1), nn.MSELoss(), adamw(), strategy=strategy)


SPECS = [InputSpec([8, 16], "float32", "x")], [InputSpec([8, 1], "float32", "y")]


def test_an_engine_that_paddles_own_tuner_plans_too_is_refused() -> None:
    made = engine()
    made._strategy.auto_mode = "full_rule_based"
    with rbt.legacy_static_ops(), pytest.raises(rbt.TunerError, match="keep auto_mode at 'semi'"):
        made.prepare(*SPECS, mode="train")


def test_the_engine_tells_the_cost_of_the_plan() -> None:
    made = engine()
    with rbt.legacy_static_ops(), pytest.warns(rbt.TunerWarning):
        microseconds, memory = made.cost(*SPECS, mode="train")
    assert microseconds > 0 and memory > 0
    assert rbt.engine_plan(made).degrees == {"pp": 1, "dp": 1, "mp": 1}


def test_communication_that_cpu_processes_lack_is_refused_by_name() -> None:
    program = gpt(2)
    legacy = read_legacy_program(program.main, program.loss)
    how = program.main, program.startup, program.loss, adamw(), legacy
    whole_rows = LegacyParallelizer(*how, one_plan(program, "1x2:V100-32G", mp=2)).rank(0)
    with pytest.raises(rbt.TunerError, match=r"c_concat.*keep the vocabulary whole"):
        check_runs_on_cpu([whole_rows.main])


def test_a_whole_vocabulary_and_data_parallelism_run_on_cpu_processes() -> None:
    for space, blocked in (({"mp": 2}, ["shared_word_embedding"]), ({"dp": 2}, [])):
        program = gpt(2)
        how = {"search_space": {"pp": 1} | space, "blocked_plugins": blocked, "cluster": "1x2:V100-32G"}
        plan = rbt.tune(program.main, loss=program.loss, **how)
        legacy = read_legacy_program(program.main, program.loss)
        chain = LegacyParallelizer(program.main, program.startup, program.loss, adamw(), legacy, plan)
        check_runs_on_cpu([chain.rank(1).main])


def test_the_pass_annotates_a_legacy_program_without_an_engine() -> None:
    program, context = gpt(2), PassContext()
    attrs = {"cluster": "1x8:V100-32G", "search_space": {"dp": 2, "mp": 4}, "loss": program.loss}
    new_pass("rule_based_tuner", attrs).apply([program.main], [program.startup], context)
    plan = context.get_attr("plan")
    from paddle.distributed.auto_parallel.static.dist_context import get_default_distributed_context

    annotated = get_default_distributed_context()
    for param in program.main.all_parameters():
        placed = annotated.get_tensor_dist_attr_for_program(param)
        assert list(placed.dims_mapping) == list(plan.placements(param.name).dims_mapping)


def test_paddles_cost_model_is_compared_with_ours_in_the_explanation() -> None:
    program = gpt(2)
    plan = rbt.tune(program.main, loss=program.loss, cluster="1x2:V100-32G", cost_model="paddle")
    assert "Paddle's CostEstimator" in plan.explain()
    assert sum("Paddle's CostEstimator" in note for note in plan.notes) >= 2


@pytest.mark.parametrize("degrees", [{"dp": 4, "mp": 2}, {"dp": 2, "mp": 2, "pp": 2}], ids=["dp4 x mp2", "dp2 x mp2 x pp2"])
def test_what_paddles_estimator_remembers_does_not_change_its_figures(degrees: dict) -> None:
    program = gpt(3)
    remembered = judged(program, one_plan(program, **degrees))
    with estimates_remembered.left_out():
        program = gpt(3)
        assert judged(program, one_plan(program, **degrees)) == remembered


def test_by_paddles_cost_model_no_plan_is_better_and_ties_are_ours_to_break() -> None:
    program = gpt(2, batch=16)
    how = {"loss": program.loss, "cluster": "1x4:V100-32G"}
    plan = rbt.tune(program.main, cost_model="paddle", **how)
    as_paddle_knows_it = one_plan(gpt(2, batch=16), "1x4:V100-32G", **plan.degrees, sharding_stage=0, accumulate_steps=1)
    assert plan.estimate.step_time_s <= as_paddle_knows_it.estimate.step_time_s
    figures = [note for note in plan.notes if "Paddle's CostEstimator" in note]
    best = min(figures, key=lambda note: float(note.split("CostEstimator ")[1].split(" ms")[0]))
    assert best.startswith(" x ".join(f"{axis} {n}" for axis, n in plan.degrees.items()))


def test_paddles_cost_model_asks_for_a_legacy_program() -> None:
    from paddle_rbt_plugin.config import Settings
    from paddle_rbt_plugin.request import Request
    from paddle_rbt_plugin.tuner import tune_graph

    graph = read_legacy_program(gpt(2).main).graph
    with pytest.raises(rbt.TunerError, match="legacy programs only"):
        tune_graph(graph, Request(Settings(cost_model="paddle", cluster="1x2:V100-32G")))


def test_the_lost_ops_come_back_only_while_they_are_asked_for() -> None:
    before = paddle._C_ops.matmul, vars(paddle.base.framework.Variable).get("matmul"), paddle.nn.functional.gelu
    with rbt.legacy_static_ops(), rbt.legacy_static_ops():
        x = paddle.static.data("lost", [4, 8])
        assert tuple(paddle.matmul(x, x, transpose_y=True).shape) == (4, 4)
        assert tuple(paddle.sum(paddle.tanh(x), axis=1).shape) == (4,)
        paddle.disable_static()
        assert float(paddle.sum(paddle.ones([2, 2])).numpy()) == 4.0
        paddle.enable_static()
    assert (paddle._C_ops.matmul, vars(paddle.base.framework.Variable).get("matmul"), paddle.nn.functional.gelu) == before
