"""Dygraph communicates what the plan counts, and its gradients are the serial ones."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
import pytest
from launching import launch
from zoo import graph

from paddle_rbt_plugin.cluster import ProcessMesh
from paddle_rbt_plugin.handover.dygraph import ops as dygraph_ops
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import analyse

KINDS = {"PToR": "all_reduce", "SToR": "all_gather", "PToS": "reduce_scatter", "SToS": "all_to_all"}
"""The changes of placement that communicate, as Paddle's log names them."""

COUNTED = ("GPT-2", "GPT-J", "T5", "LLaMA-2", "LLaMA-3", "Qwen")
"""Models whose products of sharded operands are all ``nn.Linear``."""


def communicated(log: Path, model: str) -> Counter[tuple[str, str, str]]:
    """From the log of a rank, how often each (phase, op, kind) occurs in a step along ``mp``; a mesh of one axis is ``mp``."""
    count: Counter[tuple[str, str, str]] = Counter()
    phase, op, axis = "", "", "mp"
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("STEP"):
            phase = line.split()[-1] if f"STEP {model} " in line else ""
        elif found := re.search(r"Running_(?:C\+\+|AD)_API(?:_GRAD|_Grad)?: (\w+?)\d*=", line):
            op = found[1]
        elif found := re.search(r"Get Sub Mesh .*dim_names: \[(\w+)\]", line):
            axis = found[1]
        elif (found := re.search(r"Call (\w+)Reshard", line)) and found[1] in KINDS and axis == "mp":
            count[phase, op, KINDS[found[1]]] += phase in ("forward", "backward")
    return +count


def by_kind(count: Counter[tuple[str, str, str]]) -> Counter[tuple[str, str]]:
    total: Counter[tuple[str, str]] = Counter()
    for (phase, _, kind), n in count.items():
        total[phase, kind] += n
    return total


def planned(model: str, dp: int) -> Counter[tuple[str, str]]:
    analysis = analyse(graph(model), load_plugins().patterns)
    mesh = ProcessMesh(("dp", "mp"), (dp, 2), tuple(range(2 * dp))) if dp > 1 else ProcessMesh(("mp",), (2,), (0, 1))
    kernels = (k for work in analysis.complete(mesh).work for k in (*work.forward, *work.backward))
    return Counter((k.phase, c.kind) for k in kernels for c in k.collectives if c.axis == "mp")


def run(folder: Path, processes: int, ops: str, models: tuple[str, ...]) -> tuple[Any, Path]:
    # The worker makes Paddle log what it communicates, which is decided when Paddle is imported.
    found = launch("dygraph_ops.py", processes, folder / "out.json", ops, "2", ",".join(models), fresh=True)
    return found, folder / "log" / "workerlog.0"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return run(tmp_path_factory.mktemp("mp2"), 2, "plan", COUNTED)


@pytest.mark.slow
@pytest.mark.parametrize("model", COUNTED)
def test_a_step_communicates_along_mp_what_the_plan_counts(two_ranks: tuple[Any, Path], model: str) -> None:
    assert by_kind(communicated(two_ranks[1], model)) == planned(model, dp=1)


@pytest.mark.slow
@pytest.mark.parametrize("model", COUNTED)
def test_loss_and_gradients_are_the_serial_ones(two_ranks: tuple[Any, Path], model: str) -> None:
    assert max(two_ranks[0][model].values()) < 1e-5


@pytest.mark.slow
def test_so_it_is_with_replicas(tmp_path: Path) -> None:
    models = ("GPT-2", "Qwen")
    found, log = run(tmp_path, 4, "plan", models)
    for model in models:
        assert max(found[model].values()) < 1e-5
        assert by_kind(communicated(log, model)) == planned(model, dp=2)


@pytest.mark.slow
def test_the_ops_of_paddle_still_communicate_more(tmp_path: Path) -> None:
    count = communicated(run(tmp_path, 2, "paddle", ("GPT-2",))[1], "GPT-2")
    assert count["forward", "embedding", "all_gather"] and count["backward", "embedding_grad", "all_gather"]
    assert count["forward", "cross_entropy_with_softmax", "all_gather"]
    assert count["backward", "add_grad", "all_reduce"], "the sum that forward has finished is finished again"
    assert by_kind(count)["backward", "all_reduce"] > planned("GPT-2", dp=1)["backward", "all_reduce"]


@pytest.mark.slow
def test_the_ops_of_paddle_still_refuse_the_whole_gradient_of_a_sharded_product(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="verify error"):
        run(tmp_path, 2, "paddle", ("Qwen",))


@pytest.mark.slow
def test_losses_and_embeddings_of_every_kind_equal_whole_ones(tmp_path: Path) -> None:
    found = launch("sharded_loss.py", 2, tmp_path / "out.json")
    assert {name: difference for name, difference in found.items() if difference > 1e-5} == {}


@pytest.mark.slow
def test_ops_that_reduce_or_move_a_sharded_dimension_equal_those_on_whole_tensors(tmp_path: Path) -> None:
    found = launch("dygraph_wholes.py", 2, tmp_path / "out.json", "plan")
    assert len(found) == 16 and {name: d for name, d in found.items() if d is None or d > 1e-4} == {}


@pytest.mark.slow
def test_the_ops_of_paddle_still_get_them_wrong(tmp_path: Path) -> None:
    found = launch("dygraph_wholes.py", 2, tmp_path / "out.json", "paddle")
    right = {name for name, d in found.items() if d is not None and d < 1e-4}
    assert right <= {"norm of another dimension", "a sequence with itself"}


def test_tensors_that_no_plan_has_sharded_stay_with_the_ops_of_paddle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dygraph_ops, "_meshes", [])
    dygraph_ops.shard_ops(dist.ProcessMesh([0], dim_names=["mp"]))
    x, layer, table = paddle.randn([4, 8]), paddle.nn.Linear(8, 3), paddle.nn.Embedding(5, 8)
    assert layer(x).numpy() == pytest.approx((x @ layer.weight + layer.bias).numpy(), abs=1e-6)
    assert table(paddle.to_tensor([1, 4])).numpy() == pytest.approx(table.weight.numpy()[[1, 4]])
    assert paddle.repeat_interleave(x, 2, axis=0).shape == [8, 8]
    assert float(paddle.nn.functional.cross_entropy(x, paddle.to_tensor([0, 1, 2, 3]))) > 0
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            assert paddle.nn.functional.linear(paddle.static.data("x", [2, 3]), paddle.static.data("w", [3, 4])).shape == [2, 4]
    finally:
        paddle.disable_static()
