"""What a plan was costed with is what Paddle's partitioned program of it holds, on every pipeline stage."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import paddle
import pytest

from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.handover.pir.structure import compare
from paddle_rbt_plugin.handover.pir.trace import Trace, trace_layer
from paddle_rbt_plugin.handover.pir.verification import StageComparison, verify
from paddle_rbt_plugin.layers import cluster_layers
from paddle_rbt_plugin.models import GPTConfig, LlamaConfig, build, input_spec
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.request import Request
from paddle_rbt_plugin.tuner import tune_graph

BATCH = 8
MODELS = {
    "gpt": GPTConfig(layers=4, hidden=64, ffn=256, heads=8, vocab=128, seq=16),
    "llama": LlamaConfig(layers=4, hidden=64, ffn=256, heads=8, kv_heads=4, vocab=128, seq=16),
}
DEEP = {f"deep {name}": replace(config, layers=8) for name, config in MODELS.items()}
MP_DP = {"order": "mp_dp"}
PLANS = {
    "dp2": {"dp": 2},
    "dp8": {"dp": 8},
    "mp2": {"mp": 2},
    "mp4": {"mp": 4},
    "dp2 x mp2": {"dp": 2, "mp": 2},
    "dp2 x mp4": {"dp": 2, "mp": 4},
    "dp4 x mp2": {"dp": 4, "mp": 2},
    "mp2 x dp2": {"dp": 2, "mp": 2, **MP_DP},
    "mp4 x dp2": {"dp": 2, "mp": 4, **MP_DP},
    "pp2": {"pp": 2},
    "pp2 x dp4": {"pp": 2, "dp": 4},
    "pp2 x mp4": {"pp": 2, "mp": 4},
    "pp2 x dp2 x mp2": {"pp": 2, "dp": 2, "mp": 2},
    "pp2 x mp2 x dp2": {"pp": 2, "dp": 2, "mp": 2, **MP_DP},
    "pp4 x dp2": {"pp": 4, "dp": 2},
    "pp4 x mp2": {"pp": 4, "mp": 2},
    "pp4 x dp2 x mp2": {"pp": 4, "dp": 2, "mp": 2},
}


@cache
def trace(model: str) -> Trace:
    config = (MODELS | DEEP)[model]
    with paddle.LazyGuard():
        layer = build(config)
    return trace_layer(layer, input_spec(config, BATCH))


def planned(traced: Trace, space: dict, device: str = "A100-80G") -> Plan:
    degrees = {"pp": 1, "dp": 1, "mp": 1} | space
    devices = degrees["pp"] * degrees["dp"] * degrees["mp"]
    return tune_graph(
        traced.graph, Request(Settings(cluster=f"1x{devices}:{device}", search_space=degrees), global_batch=BATCH * 4)
    )


def verified(traced: Trace, plan: Plan, train: bool = True) -> list[StageComparison]:
    return verify(plan, traced.graph, traced.program, train)


def kinds(stage: StageComparison, phase: str) -> dict[tuple[str, str], int]:
    """How often each kind along each axis occurs in a phase of the program."""
    found: dict[tuple[str, str], int] = {}
    for (when, kind, axis, _), n in stage.found.collectives.items():
        if when == phase:
            found[kind, axis] = found.get((kind, axis), 0) + n
    return found


@pytest.mark.parametrize(
    ("model", "name"),
    [("gpt", name) for name in PLANS]
    + [("llama", name) for name in ("dp4 x mp2", "mp4", "mp2 x dp2", "pp2 x dp2 x mp2", "pp4 x dp2")],
)
def test_the_prediction_is_the_program(model: str, name: str) -> None:
    stages = verified(trace(model), planned(trace(model), PLANS[name]))
    assert [stage.differences for stage in stages] == [()] * PLANS[name].get("pp", 1)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", ["dp2 x mp2", "pp2 x dp2 x mp2"])
@pytest.mark.parametrize("model", MODELS)
def test_what_backward_runs_again_is_predicted(model: str, name: str, recompute: str) -> None:
    plan = planned(trace(model), PLANS[name] | {"recompute": recompute})
    stages = verified(trace(model), plan)
    assert [stage.differences for stage in stages] == [()] * PLANS[name].get("pp", 1)
    alone = verified(trace(model), planned(trace(model), PLANS[name] | {"recompute": "none"}))
    assert stages[0].found.matmul_flop > alone[0].found.matmul_flop


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("model", "space"),
    [
        ("deep gpt", {"pp": 2, "vpp": 4}),
        ("gpt", {"pp": 2, "dp": 2, "mp": 2, "vpp": 2}),
        ("gpt", {"pp": 2, "dp": 2, "mp": 2, "vpp": 2, **MP_DP}),
        ("deep gpt", {"pp": 4, "dp": 2, "vpp": 2}),
        ("llama", {"pp": 2, "dp": 2, "mp": 2, "vpp": 2}),
        ("deep llama", {"pp": 4, "mp": 2, "vpp": 2}),
    ],
)
def test_the_prediction_is_the_program_of_interleaved_chunks(model: str, space: dict, train: bool) -> None:
    plan = planned(trace(model), space)
    assert plan.vpp == space["vpp"]
    assert [stage.differences for stage in verified(trace(model), plan, train)] == [()] * space["pp"]


@pytest.mark.parametrize(
    ("model", "name"), [("gpt", "dp2 x mp4"), ("gpt", "pp2 x mp2 x dp2"), ("llama", "mp4 x dp2"), ("llama", "pp2 x dp2 x mp2")]
)
def test_the_evaluation_program_is_predicted_as_well(model: str, name: str) -> None:
    for stage in verified(trace(model), planned(trace(model), PLANS[name]), train=False):
        assert stage.differences == ()
        assert stage.found.gradient_bytes == stage.found.optimizer_bytes == 0


def test_a_wrong_prediction_is_found() -> None:
    (mp,) = verified(trace("gpt"), planned(trace("gpt"), {"mp": 2}))
    (dp,) = verified(trace("gpt"), planned(trace("gpt"), {"dp": 2}))
    lines = compare(dp.predicted, mp.found)
    assert any("all_reduce along mp" in line for line in lines)
    assert any("parameter bytes" in line for line in lines)
    assert any("local shape" in line for line in lines)


def test_a_tied_head_lies_on_both_ends_which_exchange_its_gradient_once_a_step() -> None:
    nbytes = 128 * 64 * 4
    embedding = next(t.name for t in trace("gpt").graph.params if t.shape == (128, 64))
    for zero, exchanged in ((0, nbytes), (1, nbytes // 2), (2, nbytes // 2)):
        first, last = verified(trace("gpt"), planned(trace("gpt"), {"pp": 2, "dp": 2, "sharding_stage": zero}))
        for stage in (first, last):
            assert stage.differences == ()
            assert stage.found.local_shapes[embedding] == (128, 64)
            assert kinds(stage, "optimizer")["send", "pp"] == kinds(stage, "optimizer")["receive", "pp"] == 1
            assert stage.found.collectives["optimizer", "send", "pp", exchanged] == 1
            # What goes from stage to stage in a micro batch is the hidden state, and its gradient comes back.
            passing = [key for phase in ("forward", "backward") for key in kinds(stage, phase) if key[1] == "pp"]
            assert len(passing) == 2


@pytest.mark.parametrize("model", MODELS)
def test_stages_send_hidden_states_to_the_next_one_and_nothing_else(model: str) -> None:
    first, second, third, last = verified(trace(model), planned(trace(model), {"pp": 4}))
    for stage in (first, second, third):
        assert kinds(stage, "forward")["send", "pp"] == kinds(stage, "backward")["receive", "pp"] == 1
    for stage in (second, third, last):
        assert kinds(stage, "forward")["receive", "pp"] == kinds(stage, "backward")["send", "pp"] == 1
    assert ("send", "pp") not in kinds(last, "forward")
    assert ("receive", "pp") not in kinds(first, "forward")


class Biased(paddle.nn.Layer):
    """Layers that share one value of a trained parameter, one of the batch, and a constant that is a product of matrices. The
    last one reads the first layer's weight again."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.up = paddle.nn.LayerList([paddle.nn.Linear(width, 2 * width) for _ in range(layers)])
        self.down = paddle.nn.LayerList([paddle.nn.Linear(2 * width, width) for _ in range(layers)])
        self.bias = self.create_parameter([width, width])

    def forward(self, x):
        shared = paddle.tanh(self.bias)
        of_batch = paddle.cast(x > 0, "float32")
        constant = paddle.matmul(paddle.ones([16, 4]), paddle.triu(paddle.ones([4, 16])))
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(paddle.nn.functional.gelu(up(x)))
            x = x * of_batch + paddle.matmul(x, shared) + paddle.matmul(x, constant)
        return paddle.matmul(x, self.up[0].weight).square().mean()


@pytest.mark.parametrize("space", [{"pp": 4}, {"pp": 2, "dp": 2}, {"pp": 2, "vpp": 2}], ids=str)
def test_values_that_all_layers_read_go_from_stage_to_stage_and_constants_are_computed_there(space: dict) -> None:
    traced = trace_layer(Biased(), [paddle.static.InputSpec([BATCH, 16], "float32", "x")])
    stages = verified(traced, planned(traced, space))
    assert [stage.differences for stage in stages] == [()] * space["pp"]
    # The hidden state and both shared values go on from each stage to the next; the gradients of two of them come back.
    hops = space["pp"] * space.get("vpp", 1) - 1
    assert sum(kinds(stage, "forward").get(("send", "pp"), 0) for stage in stages) == hops + 2 * (space["pp"] - 1)
    assert sum(kinds(stage, "backward").get(("send", "pp"), 0) for stage in stages) == hops + space["pp"] - 1


def test_logits_stay_sharded_on_gpus_and_are_gathered_on_cpus() -> None:
    gpu, cpu = planned(trace("gpt"), {"mp": 2}), planned(trace("gpt"), {"mp": 2}, "CPU")
    (kept,), (gathered,) = verified(trace("gpt"), gpu), verified(trace("gpt"), cpu)
    assert kept.differences == gathered.differences == ()
    assert ("all_gather", "mp") not in kinds(kept, "forward")
    assert kinds(gathered, "forward")["all_gather", "mp"] == 1
    note = "rewritten to keep shardings: 1 cross_entropy_with_softmax as c_softmax_with_cross_entropy"
    assert note in gpu.notes and note not in cpu.notes


class Adapted(paddle.nn.Layer):
    """A frozen projection with a trained one of low rank beside it (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: paddle.nn.Linear, rank: int = 4):
        super().__init__()
        self.base = base
        for parameter in base.parameters():
            parameter.stop_gradient = True
        rows, columns = base.weight.shape
        self.down = paddle.nn.Linear(rows, rank, bias_attr=False)
        self.up = paddle.nn.Linear(rank, columns, bias_attr=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def with_adapters(config: GPTConfig) -> paddle.nn.Layer:
    """The model frozen but for adapters beside every other Linear."""
    model = build(config)
    linears = [(path, layer) for path, layer in model.named_sublayers() if isinstance(layer, paddle.nn.Linear)]
    for parameter in model.parameters():
        parameter.stop_gradient = True
    for path, layer in linears[::2]:
        *parents, name = path.split(".")
        parent = model
        for part in parents:
            parent = getattr(parent, part) if not part.isdigit() else parent[int(part)]
        setattr(parent, name, Adapted(layer))
    return model


@pytest.mark.parametrize("name", ["dp2 x mp2", "mp4", "pp2 x dp2 x mp2"])
def test_frozen_parameters_have_neither_gradients_nor_states(name: str) -> None:
    config = MODELS["gpt"]
    with paddle.LazyGuard():
        model = with_adapters(config)
    traced = trace_layer(model, input_spec(config, BATCH))
    plan = planned(traced, PLANS[name])
    for stage in verified(traced, plan):
        assert stage.differences == ()
        assert 0 < stage.found.gradient_bytes < stage.found.parameter_bytes / 4
        assert stage.found.optimizer_bytes == 2 * stage.found.gradient_bytes
    memory = plan.estimate.memory
    assert memory["optimizer_states"] == 2 * memory["gradients"]
    assert memory["gradients"] < memory["parameters"] / 4


def test_a_frozen_layer_is_of_another_kind_than_a_trained_one() -> None:
    config = MODELS["gpt"]
    with paddle.LazyGuard():
        model = build(config)
    for path, parameter in model.named_parameters():
        parameter.stop_gradient = ".layers.0." in path or ".layers.1." in path
    traced = trace_layer(model, input_spec(config, BATCH))
    blocks = cluster_layers(traced.graph).blocks
    assert len(blocks) == 4
    assert blocks[0].kind == blocks[1].kind != blocks[2].kind
    for stage in verified(traced, planned(traced, {"pp": 2, "mp": 2})):
        assert stage.differences == ()


class Reversing(paddle.nn.Layer):
    """A model with an op that Paddle has no sharding rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = paddle.nn.Linear(32, 64), paddle.nn.Linear(64, 32)

    def forward(self, x):
        return paddle.flip(self.down(paddle.nn.functional.gelu(self.up(x))), axis=[1]).square().mean()


def test_an_op_without_a_sharding_rule_is_costed_as_its_bytes_and_listed() -> None:
    traced = trace_layer(Reversing(), [paddle.static.InputSpec([BATCH, 16, 32], "float32", "x")])
    plan = planned(traced, {"dp": 2})
    assert [note for note in plan.notes if "1 flip" in note and "costed as the bytes" in note]
    assert "1 flip" in " ".join(plan.explain().split())
    assert verified(traced, plan)[0].differences == ()


def test_the_products_of_convolutions_are_counted_in_the_program_too() -> None:
    class Images(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = paddle.nn.Conv2D(3, 8, 3), paddle.nn.GroupNorm(2, 8), paddle.nn.Linear(8, 1)

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return paddle.mean(self.head(paddle.nn.functional.relu(self.norm(self.conv(x))).mean([2, 3])))

    spec = [paddle.static.InputSpec([4, 3, 8, 8], "float32", "x")]
    traced = trace_layer(Images(), spec)
    plan = tune_graph(traced.graph, Request(Settings(cluster="1x2:V100-32G", search_space={"dp": 2})))
    (compared,) = verify(plan, traced.graph, traced.program)
    assert compared.found.matmul_flop > 0
    assert not compared.differences
