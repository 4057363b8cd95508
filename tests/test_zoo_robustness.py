"""What real training code adds to a model (dropout, in-place ops, mixed precision, recompute, fused attention) breaks neither
matching, nor completion, nor hand-over."""

from __future__ import annotations

from collections import Counter

import paddle
import pytest
from paddle.distributed.passes.pass_base import PassContext, new_pass
from zoo import ZOO, graph
from zoo.bert import BERT
from zoo.gpt2 import GPT2
from zoo.t5 import T5

from paddle_rbt_plugin.cluster import ProcessMesh
from paddle_rbt_plugin.completion.forms import SHARDED_FORMS
from paddle_rbt_plugin.graph.pir import RECOMPUTE_MARKS
from paddle_rbt_plugin.handover.pir.trace import trace_layer
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import Analysis, analyse


class MixedPrecision(paddle.nn.Layer):
    """A model under auto_cast: weights and activations are cast where they are used (O1), or nearly everywhere (O2)."""

    def __init__(self, model, level):
        super().__init__()
        self.model, self.level = model, level

    def forward(self, *inputs):
        with paddle.amp.auto_cast(level=self.level, dtype="bfloat16"):
            return self.model(*inputs)


class InPlace(paddle.nn.Layer):
    """A model that reads what an in-place op has changed."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        norm, forward = model.norm, model.norm.forward
        norm.forward = lambda x: forward(x.scale_(1.0))

    def forward(self, *inputs):
        return self.model(*inputs)


class Recomputed(paddle.nn.Layer):
    """A model that recomputes its blocks in the backward pass."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        for block in model.blocks:
            block.forward = self.recomputing(block.forward)

    @staticmethod
    def recomputing(forward):
        return lambda *inputs: paddle.distributed.fleet.utils.recompute(forward, *inputs)

    def forward(self, *inputs):
        return self.model(*inputs)


CASES = {
    "dropout": ("GPT-2", lambda: GPT2(dropout=0.1)),
    "dropout behind norms": ("BERT", lambda: BERT(dropout=0.1)),
    "in-place ops": ("GPT-2", lambda: InPlace(GPT2())),
    "recompute": ("GPT-2", lambda: Recomputed(GPT2())),
    **{f"mixed precision O1 of {name}": (name, "O1") for name in ("GPT-2", "GPT-J", "BERT", "T5", "ViT")},
    **{f"mixed precision O2 of {name}": (name, "O2") for name in ("GPT-2", "GPT-J", "BERT", "T5", "ViT")},
}
CASE = pytest.mark.parametrize("case", CASES)


def traced(case: str):
    name, build = CASES[case]
    layer = MixedPrecision(ZOO[name].build(), build) if isinstance(build, str) else build()
    return trace_layer(layer, ZOO[name].spec)


def analysed(found) -> Analysis:
    return analyse(found, load_plugins().patterns)


def claimed_params(analysis: Analysis) -> Counter:
    params = {t.index for t in analysis.graph.params}
    return Counter((match.pattern, spec) for t, (spec, match) in analysis.claims.items() if t in params)


@CASE
def test_the_same_parameters_are_claimed_in_the_same_way(case):
    plain = analysed(graph(CASES[case][0]))
    found = analysed(traced(case).graph)
    assert claimed_params(found) == claimed_params(plain)
    assert found.layers.count == plain.layers.count
    assert not found.unmatched and not found.matches.failed and not found.matches.incomplete


@CASE
def test_the_program_is_handed_over_op_for_op(case):
    trace = traced(case)
    flattened = ["pd_op.full_int_array", "pd_op.reshape"]
    named = (op.name() for op in trace.program.global_block().ops)
    before = [name for op in named for name in (flattened if op == "pd_op.flatten" else [op])]
    context = PassContext()
    attrs = {"cluster": "1x4:A100-80G", "search_space": {"mp": [2], "dp": [2]}}
    new_pass("rule_based_tuner", attrs).apply([trace.program], [paddle.static.Program()], context)
    ops = trace.program.global_block().ops
    forms = {f"pd_op.{form}": f"pd_op.{op}" for form, op in SHARDED_FORMS.items()}
    renamed = [forms.get(op.name(), op.name()) for op in ops if op.name() != "pd_op.seed"]
    assert renamed == before
    plan = context.get_attr("plan")
    for op in ops:
        if op.name() == "builtin.parameter":
            planned = plan.tensors[op.attrs()["parameter_name"]]
            assert tuple(op.result(0).dist_attr().dims_mapping) == planned.dims_mapping
    assert all(v.is_dist() for op in ops for v in op.results() if op.name().startswith("pd_op.") and _is_activation(op, v))


def _is_activation(op, value) -> bool:
    constants = ("pd_op.full", "pd_op.arange", "pd_op.assign_value")
    return value.initialized() and not value.is_combine() and bool(op.operands_source()) and not op.name().startswith(constants)


def test_the_marks_of_recomputed_regions_are_handed_over():
    trace = traced("recompute")

    def marks():
        ops = (op for op in trace.program.global_block().ops if op.name().startswith("pd_op."))
        return [tuple(op.attrs().get(mark) for mark in RECOMPUTE_MARKS) for op in ops]

    before = marks()
    assert len({mark for mark, _ in before}) == 3, "two blocks, and what is not recomputed"
    attrs = {"cluster": "1x2:A100-80G", "search_space": {"mp": [2]}}
    new_pass("rule_based_tuner", attrs).apply([trace.program], [paddle.static.Program()], PassContext())
    assert marks() == before


def test_parameters_in_bfloat16_are_claimed_in_the_same_way_and_complete():
    found = analysed(trace_layer(T5().bfloat16(), ZOO["T5"].spec).graph)
    assert {p.dtype for p in found.graph.params} == {"bfloat16"}
    assert claimed_params(found) == claimed_params(analysed(graph("T5")))
    completion = found.complete(ProcessMesh(("dp", "mp"), (2, 2), tuple(range(4))))
    assert not found.lost_sharding(completion)
    gradients = [v for w in completion.work for k in w.backward for v in k.outputs if k.type == "softmax_grad"]
    assert "bfloat16" in {v.dtype for v in gradients}, "the CPU wheel has no such kernel, so Paddle is asked in float32"


def test_scaled_dot_product_attention_is_attention():
    patterns = Counter(match.pattern for match in analysed(graph("LLaMA-2")).matches.matches)
    assert patterns["qkv"] == patterns["row_matmul"] == 2
