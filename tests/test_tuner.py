"""From a model to a plan: what ``rbt.tune`` decides, and how it answers wrong input."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import paddle
import pytest
from paddle import nn
from paddle.static import InputSpec
from small import SMALL_GPT, lazy_gpt, static_program, traced_gpt

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.models import GPTConfig, input_spec

GPT = replace(SMALL_GPT, hidden=64, ffn=256, heads=8, vocab=1024)


def plan_gpt(config: GPTConfig = GPT, batch: int = 8, **settings) -> rbt.Plan:
    settings.setdefault("cluster", "1x8:A100-80G")
    return rbt.tune(lazy_gpt(config), input_spec=input_spec(config, batch), **settings)


class Plain(nn.Layer):
    """A model that no pattern knows."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(32, 16), nn.Linear(16, 32)

    def forward(self, x):
        return paddle.mean(paddle.sin(self.up(paddle.cos(self.down(x)))))


def test_every_matched_tensor_lies_as_its_pattern_says() -> None:
    plan = plan_gpt(search_space={"mp": 4, "dp": 2})
    expected = {
        "gpt.layers.0.attn.q_proj.weight": (-1, 1),
        "gpt.layers.1.attn.v_proj.weight": (-1, 1),
        "gpt.layers.0.attn.k_proj.bias": (1,),
        "gpt.layers.0.attn.out_proj.weight": (1, -1),
        "gpt.layers.1.ffn.up_proj.weight": (-1, 1),
        "gpt.layers.1.ffn.up_proj.bias": (1,),
        "gpt.layers.1.ffn.down_proj.weight": (1, -1),
        "gpt.word_embeddings.weight": (1, -1),
        "gpt.position_embeddings.weight": (-1, -1),
        "tokens": (0, -1),
        "loss_mask": (0, -1),
        "attention_mask": (0, -1, -1, -1),
    }
    assert {name: plan.placements(name).dims_mapping for name in expected} == expected
    assert plan.placements("gpt.layers.0.attn.q_proj.weight").pattern == "qkv"
    assert plan.placements("gpt.layers.0.attn.q_proj.weight").distribution == "paddle-rbt-plugin"
    assert plan.degrees == {"pp": 1, "dp": 2, "mp": 4}


def test_the_other_order_of_axes_maps_the_same_names() -> None:
    plan = plan_gpt(search_space={"mp": 4, "dp": 2, "order": "mp_dp"})
    assert plan.stages[0].axes == ("mp", "dp")
    assert plan.placements("gpt.layers.0.attn.q_proj.weight").dims_mapping == (-1, 0)
    assert plan.placements("tokens").dims_mapping == (1, -1)


def test_equal_inputs_give_equal_plans() -> None:
    first, second = plan_gpt().to_dict(), plan_gpt().to_dict()
    names = [[t["structured_name"] for t in plan.pop("tensors").values()] for plan in (first, second)]
    first.pop("unmatched"), second.pop("unmatched")
    assert first == second and names[0] == names[1]


def test_a_static_program_is_planned_as_the_layer_it_came_from() -> None:
    from_program = rbt.tune(traced_gpt(GPT).program, cluster="1x8:A100-80G")
    from_layer = plan_gpt()
    assert from_program.signature == from_layer.signature
    assert from_program.degrees == from_layer.degrees
    placed = [[t.dims_mapping for t in plan.tensors.values()] for plan in (from_program, from_layer)]
    assert placed[0] == placed[1]


def test_the_global_batch_sets_the_batch_of_a_layer() -> None:
    plan = rbt.tune(
        lazy_gpt(GPT),
        input_spec=[InputSpec([None, *s.shape[1:]], s.dtype, s.name) for s in input_spec(GPT, 1)],
        cluster="1x8:A100-80G",
        global_batch=64,
    )
    assert plan.global_batch == 64
    assert plan.micro_batch * plan.accumulate_steps * plan.degrees["dp"] == 64


@pytest.mark.parametrize(
    ("dtype", "asked", "planned", "said"),
    [
        ("float32", None, "fp32", False),
        ("bfloat16", None, "bf16", False),
        ("float32", "bf16", "bf16", False),
        ("bfloat16", "bf16", "bf16", False),
        ("bfloat16", "fp32", "fp32", True),
        ("bfloat16", "fp16", "fp16", True),
    ],
)
def test_the_precision_is_that_of_the_weights_unless_another_is_asked_for(dtype, asked, planned, said) -> None:
    class Network(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x):
            return self.down(nn.functional.relu(self.up(x))).astype("float32").square().mean()

    network = Network().to(dtype=dtype)
    plan = rbt.tune(network, input_spec=[InputSpec([8, 64], dtype, "x")], precision=asked, cluster="1x2:A100-80G")
    assert plan.precision == planned
    assert any("the weights are" in note for note in plan.notes) == said


def test_a_model_that_no_pattern_matches_is_planned_data_parallel_and_says_so() -> None:
    with pytest.warns(rbt.TunerWarning, match=r"no pattern matches.*cos, matmul, mean, sin"):
        plan = rbt.tune(Plain(), input_spec=[InputSpec([16, 32], "float32", "x")], cluster="1x8:A100-80G")
    assert plan.degrees == {"pp": 1, "dp": 8, "mp": 1}
    assert plan.placements("x").dims_mapping == (0, -1)
    assert len(plan.unmatched) == 2 and plan.unmatched[0]["readers"][0].startswith("matmul")


def test_a_blocked_pattern_decides_nothing() -> None:
    plan = plan_gpt(blocked_plugins=["ffn"], search_space={"mp": 8})
    assert plan.placements("gpt.layers.0.ffn.up_proj.weight").pattern is None
    assert any("up_proj" in weight["name"] for weight in plan.unmatched)
    assert "ffn" not in plan.patterns


def test_a_saved_plan_is_used_again_without_a_search(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made = plan_gpt(save_path=path)
    used = plan_gpt(load_path=path)
    assert used.to_dict() == made.to_dict()


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_gpt(save_path=path)
    with pytest.raises(rbt.PlanError, match=r"another program.*parameters"):
        plan_gpt(replace(GPT, layers=3), load_path=path)
    with pytest.raises(rbt.PlanError, match=r"another program.*shapes"):
        plan_gpt(replace(GPT, ffn=128), load_path=path)


def test_a_plan_of_another_cluster_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_gpt(save_path=path)
    with pytest.raises(rbt.PlanError, match=r"1x8:A100-80G.*1x4:A100-80G"):
        plan_gpt(load_path=path, cluster="1x4:A100-80G")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"cluster": "1x8:A100-81G"}, rbt.ClusterError, "A100-80G"),
        ({"cluster": "eight gpus"}, rbt.ClusterError, "4x8:A100-80G"),
        ({"level": "o7"}, rbt.TunerError, "level"),
        ({"serach_space": {}}, rbt.TunerError, "did you mean search_space"),
        ({"search_space": {"tp": 2}}, rbt.TunerError, "unknown dimension 'tp'"),
        ({"search_space": {"mp": "two"}}, rbt.TunerError, "mp must be"),
        ({"search_space": {"recompute": "some"}}, rbt.TunerError, "recompute"),
        ({"global_batch": 0}, rbt.TunerError, "global_batch"),
        ({"precision": "int3"}, rbt.TunerError, "precision"),
        ({"blocked_plugins": ["no-such-plugin"]}, rbt.PatternError, "no-such-plugin"),
    ],
)
def test_wrong_settings_are_answered_with_what_would_be_right(settings, error, message: str) -> None:
    with pytest.raises(error, match=message):
        plan_gpt(**settings)


SIX_HEADS = replace(GPT, hidden=96, heads=6)


def placed(plan: rbt.Plan, ending: str) -> set[tuple[int, ...]]:
    return {t.dims_mapping for t in plan.tensors.values() if t.structured_name.endswith(ending)}


def test_heads_that_a_degree_does_not_divide_rule_it_out_with_the_legal_ones() -> None:
    plan = plan_gpt(SIX_HEADS)
    reasons = {str(r["reason"]) for r in plan.rejected if r["candidate"].get("mp") == 8}
    assert any("mp 8 does not divide the 6 attention heads" in why and "legal: 1, 2, 3, 6" in why for why in reasons)


def test_heads_that_a_degree_does_not_divide_stay_whole_where_it_is_asked_for() -> None:
    plan = plan_gpt(SIX_HEADS, search_space={"mp": 8})
    assert placed(plan, "q_proj.weight") == {(-1, -1)} and placed(plan, "up_proj.weight") == {(-1, 0)}
    assert any("qkv asks in 2 places: mp 8 does not divide the 6 attention heads" in note for note in plan.notes)


def test_a_vocabulary_that_a_degree_does_not_divide_stays_whole() -> None:
    plan = plan_gpt(replace(GPT, vocab=1001), search_space={"mp": 2})
    assert placed(plan, "word_embeddings.weight") == {(-1, -1)} and placed(plan, "q_proj.weight") == {(-1, 1)}
    assert any("mp 2 does not divide the 1001 vocabulary" in note for note in plan.notes)


def test_a_part_that_a_degree_does_not_divide_does_not_forbid_it_for_the_others() -> None:
    class Attention(nn.Layer):
        def __init__(self, hidden: int, heads: int) -> None:
            super().__init__()
            self.heads, self.qkv = heads, nn.LayerList([nn.Linear(hidden, hidden) for _ in range(3)])
            self.out, self.up, self.down = nn.Linear(hidden, hidden), nn.Linear(hidden, 64), nn.Linear(64, hidden)

        def forward(self, x):
            q, k, v = (p(x).reshape([0, 0, self.heads, -1]).transpose([0, 2, 1, 3]) for p in self.qkv)
            scores = nn.functional.softmax(q.matmul(k, transpose_y=True))
            x = x + self.out(scores.matmul(v).transpose([0, 2, 1, 3]).reshape([0, 0, self.out.weight.shape[0]]))
            return x + self.down(nn.functional.gelu(self.up(x)))

    class Both(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.LayerList([Attention(40, 5) for _ in range(2)])
            self.between = nn.Linear(40, 32)
            self.language = nn.LayerList([Attention(32, 4) for _ in range(3)])

        def forward(self, x):
            for block in self.tower:
                x = block(x)
            x = self.between(x)
            for block in self.language:
                x = block(x)
            return x.square().mean()

    plan = rbt.tune(
        Both(), input_spec=[InputSpec([4, 8, 40], "float32", "x")], cluster="1x4:A100-80G", search_space={"mp": 4, "dp": 1}
    )
    shards = {t.structured_name: max(t.dims_mapping) >= 0 for t in plan.tensors.values() if "qkv" in t.structured_name}
    assert {name.split(".")[0] for name, sharded in shards.items() if sharded and name.endswith("weight")} == {"language"}
    assert any("mp 4 does not divide the 5 attention heads" in note for note in plan.notes)


def test_a_batch_that_nothing_divides_is_named() -> None:
    with pytest.raises(rbt.NoFeasiblePlan, match="dp 8 does not divide the global batch of 6"):
        plan_gpt(batch=6, search_space={"dp": 8})


def test_a_model_that_fits_nowhere_is_told_the_nearest_candidate_and_what_it_lacks() -> None:
    large = replace(GPT, hidden=12288, ffn=49152, heads=96, vocab=50304, seq=2048)
    with pytest.raises(rbt.NoFeasiblePlan, match=r"nearest candidate.*GiB more than"):
        plan_gpt(large, batch=1, cluster="1x1:V100-16G")


def test_more_devices_than_anything_divides_have_no_plan() -> None:
    with pytest.raises(rbt.NoFeasiblePlan, match="11 devices"):
        plan_gpt(cluster="1x11:A100-80G")


def test_things_that_are_no_program_are_refused() -> None:
    with pytest.raises(rbt.UnsupportedProgram, match="not str"):
        rbt.tune("gpt", cluster="1x8:A100-80G")
    with pytest.raises(rbt.TunerError, match="input_spec"):
        rbt.tune(Plain(), cluster="1x8:A100-80G")
    with pytest.raises(rbt.UnsupportedProgram, match="empty"):
        rbt.tune(paddle.static.Program(), cluster="1x8:A100-80G")


def test_a_program_without_data_is_refused() -> None:
    with pytest.raises(rbt.UnsupportedProgram, match="no data input"):
        rbt.tune(static_program(lambda: paddle.mean(paddle.rand([4, 4]))), cluster="1x8:A100-80G")


def test_nothing_is_warned_about_when_all_is_well() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", rbt.TunerWarning)
        plan_gpt()


def test_weights_that_nothing_reads_take_memory_and_nothing_else() -> None:
    class Network(nn.Layer):
        def __init__(self, idle: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
            self.idle = nn.Linear(idle, 128) if idle else None

        def forward(self, x):
            return self.down(nn.functional.gelu(self.up(x))).square().mean()

    without, with_idle = (
        rbt.tune(Network(n), input_spec=[InputSpec([8, 64], "float32", "x")], cluster="1x2:A100-80G", search_space={"dp": 2})
        for n in (0, 512)
    )
    more = {name: n - without.estimate.memory[name] for name, n in with_idle.estimate.memory.items()}
    assert {name: n for name, n in more.items() if n} == {"parameters": 4 * (512 * 128 + 128)}
    assert with_idle.estimate.time == without.estimate.time
