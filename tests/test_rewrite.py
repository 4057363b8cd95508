"""Ops written in another way mean the same, and keep what the old ones threw away."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from launching import launch
from zoo import ZOO, graph

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.cluster.mesh import ProcessMesh
from paddle_rbt_plugin.completion import Oracle, Placement
from paddle_rbt_plugin.completion.forms import CPU_FORMS, Form, sharded_form
from paddle_rbt_plugin.completion.question import Operand, Question
from paddle_rbt_plugin.graph.rewrite import rewrite_graph
from paddle_rbt_plugin.handover.pir.rewrite import SerialOp, build_op

ONE = ProcessMesh(("mp",), (1,), (0,))
MESH = ProcessMesh(("dp", "mp"), (2, 2), (0, 1, 2, 3))
SHARDED = Placement((0, -1, 1, -1, -1))


def run(forward, x):
    """What a static program makes of ``x``, and the gradient of its sum of squares."""
    paddle.enable_static()
    try:
        program = paddle.static.Program()
        with paddle.static.program_guard(program, paddle.static.Program()):
            data = paddle.static.data("x", x.shape, "float32")
            data.stop_gradient = False
            y = forward(paddle.scale(data, 1.0))
            (gradient,) = paddle.static.gradients([paddle.sum(y * y)], [data])
            return paddle.static.Executor().run(program, feed={"x": x}, fetch_list=[y, gradient])
    finally:
        paddle.disable_static()


def rebuilt(serial):
    """The function that builds what ``build_op`` puts in the place of ``serial``'s last op."""

    def forward(x):
        y = serial(x)
        op = y.get_defining_op()
        attrs = {k: v for k, v in op.attrs().items() if k in ("axis", "repeats")}
        name = op.name().removeprefix("pd_op.")
        ops = build_op(SerialOp(name, attrs, y, ONE, CPU_FORMS), {"x": [x]})
        assert name not in {new.name().removeprefix("pd_op.") for new in ops}
        return ops[-1].result(0)

    return forward


@pytest.mark.parametrize(
    ("serial", "shape"),
    [
        (lambda x: paddle.expand(x, [2, 3, 4, 5, 6]), [2, 3, 4, 1, 6]),
        (lambda x: paddle.expand(x, [2, 3, 4]), [1, 3, 1]),
        (lambda x: paddle.tile(x, [1, 1, 1, 5, 1]), [2, 3, 4, 1, 6]),
        (lambda x: paddle.repeat_interleave(x, 3, axis=2), [2, 3, 4, 6]),
        (lambda x: paddle.repeat_interleave(x, 2, axis=-1), [2, 6]),
    ],
    ids=["expand", "expand twice", "tile", "repeat heads", "repeat the last"],
)
def test_the_new_spelling_gives_the_same_values_and_gradients(serial, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype("float32")
    for expected, found in zip(run(serial, x), run(rebuilt(serial), x), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_paddle_still_throws_the_shardings_of_expand_away():
    """Once it does not, the rule can go."""
    operand = Operand((4, 8, 4, 1, 16), "float32", SHARDED, False)
    built = Oracle(MESH).forward(Question("expand", (("shape", (4, 8, 4, 2, 16)),), (("x", (operand,)),)))
    assert not built.products[0].kept.is_sharded()


def test_paddle_still_throws_the_shardings_of_tile_away_backward():
    """Why the spelling is not the obvious one."""
    operand = Operand((4, 8, 4, 1, 16), "float32", SHARDED, False)
    question = Question("tile", (("repeat_times", (1, 1, 1, 2, 1)),), (("x", (operand,)),), (SHARDED,))
    (built,) = Oracle(MESH).backward(question)
    assert not built.uses[-1].need.is_sharded()


@pytest.mark.parametrize("name", ["LLaMA-3", "Qwen"])
def test_a_rewritten_graph_keeps_the_names_of_what_it_does_not_replace(name):
    old = graph(name)
    new, notes = rewrite_graph(old)
    assert notes and not {"expand", "repeat_interleave"} & {op.type for op in new}
    assert [t.name for t in new.tensors[: len(old.tensors)]] == [t.name for t in old.tensors]
    assert [op.index for op in new] == list(range(len(new.ops)))
    assert {op.name for op in old} <= {op.name for op in new}
    assert len({t.name for t in new.tensors}) == len(new.tensors)
    assert rewrite_graph(new) == (new, ())


def test_a_graph_without_such_ops_is_left_alone():
    old = graph("GPT-2")
    assert rewrite_graph(old)[0] is old


def test_each_rank_looks_up_its_own_slice_of_the_vocabulary():
    shapes, placements = {"weight": (100, 8)}, {"weight": Placement((1, -1))}
    forms = [sharded_form("embedding", {"padding_idx": -1}, shapes, placements, MESH, rank) for rank in MESH.ranks]
    assert [form.type for form in forms] == ["c_embedding"] * 4
    assert [form.attrs["start_index"] for form in forms] == [0, 50, 0, 50]


@pytest.mark.parametrize(
    ("attrs", "placement"),
    [({"padding_idx": 3}, (1, -1)), ({"padding_idx": -1}, (-1, 1)), ({"padding_idx": -1}, (-1, -1))],
    ids=["padding", "hidden size sharded", "whole"],
)
def test_other_embeddings_stay_as_they_are(attrs, placement):
    form = sharded_form("embedding", attrs, {"weight": (100, 8)}, {"weight": Placement(placement)}, MESH, 1)
    assert form == Form("embedding", attrs)


LOSS = {"soft_label": False, "use_softmax": True, "numeric_stable_mode": True, "ignore_index": -100, "axis": -1}


def loss_form(attrs, label=(8, 4, 1), logits=(0, -1, 1), rank=3):
    placements = {"input": Placement(logits), "label": Placement((0, -1, -1)[: len(label)])}
    return sharded_form("cross_entropy_with_softmax", attrs, {"input": (8, 4, 100), "label": label}, placements, MESH, rank)


def test_each_rank_computes_the_loss_on_its_own_slice_of_the_logits():
    form = loss_form(LOSS)
    assert (form.type, form.axis) == ("c_softmax_with_cross_entropy", "mp")
    assert form.attrs == {"ignore_index": -100, "ring_id": 0, "rank": 1, "nranks": 2}


@pytest.mark.parametrize(
    "form",
    [
        loss_form(LOSS, logits=(0, -1, -1)),
        loss_form(LOSS, logits=(-1, 1, -1)),
        loss_form(LOSS | {"soft_label": True}, label=(8, 4, 100)),
        loss_form(LOSS | {"axis": 1}),
        loss_form(LOSS | {"use_softmax": False}),
    ],
    ids=["whole", "sequence sharded", "soft labels", "classes elsewhere", "probabilities"],
)
def test_other_losses_stay_as_they_are(form):
    assert form.type == "cross_entropy_with_softmax"


def test_the_plan_lists_what_is_written_in_another_way():
    model = ZOO["Qwen"]
    plan = rbt.tune(model.build(), input_spec=model.spec, cluster="1x2:A100-80G", search_space={"mp": [2], "pp": [1]})
    notes = [note for note in plan.notes if note.startswith("rewritten to keep shardings: ")]
    assert [note.split(": ")[1] for note in notes] == [
        "4 repeat_interleave as unsqueeze, full, add, reshape",
        "1 embedding as c_embedding",
        "1 cross_entropy_with_softmax as c_softmax_with_cross_entropy",
    ]
    plan.check_program(graph("Qwen"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT-2", "LLaMA-3", "Qwen"])
def test_a_handed_over_program_with_rewritten_ops_gives_the_serial_loss(name, tmp_path):
    losses = launch("zoo_static.py", 2, tmp_path / "losses.json", name)
    assert losses["parallel"] == pytest.approx(losses["serial"], abs=1e-5)
    assert "c_embedding" in losses["ops"] and not {"expand", "repeat_interleave"} & set(losses["ops"])
