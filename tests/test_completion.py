"""Completion is checked op for op against the program that Paddle partitions under the same plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import paddle
import pytest
from partitioned import PartitionedOp, computing_ops

from paddle_rbt_plugin.cluster import ProcessMesh
from paddle_rbt_plugin.completion import Completion, Placement
from paddle_rbt_plugin.completion.work import Kernel, Value
from paddle_rbt_plugin.handover.pir.partitioning import partition
from paddle_rbt_plugin.handover.pir.replay import annotate
from paddle_rbt_plugin.handover.pir.trace import Trace, trace_layer
from paddle_rbt_plugin.models import GPTConfig, LlamaConfig, build, input_spec
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import Analysis, analyse

BATCH = 8
MESHES = {
    "dp2": (("dp",), (2,)),
    "dp4": (("dp",), (4,)),
    "dp8": (("dp",), (8,)),
    "mp2": (("mp",), (2,)),
    "mp4": (("mp",), (4,)),
    "mp8": (("mp",), (8,)),
    "dp2 x mp2": (("dp", "mp"), (2, 2)),
    "mp2 x dp2": (("mp", "dp"), (2, 2)),
    "dp2 x mp4": (("dp", "mp"), (2, 4)),
    "dp4 x mp2": (("dp", "mp"), (4, 2)),
    "mp4 x dp2": (("mp", "dp"), (4, 2)),
    "mp2 x dp4": (("mp", "dp"), (2, 4)),
}


def mesh_of(name: str) -> ProcessMesh:
    axes, shape = MESHES[name]
    size = 1
    for n in shape:
        size *= n
    return ProcessMesh(axes, shape, tuple(range(size)))


class Model:
    """A traced model, its parameters and its analysis."""

    def __init__(self, config: GPTConfig | LlamaConfig):
        with paddle.LazyGuard():
            layer = build(config)
        self.trace: Trace = trace_layer(layer, input_spec(config, BATCH))
        self.analysis: Analysis = analyse(self.trace.graph, load_plugins().patterns)

    def partitioned(self, mesh: ProcessMesh):
        program = self.trace.program.clone()
        graph = self.trace.graph
        annotate(program, mesh, {t.name: self.analysis.placement(t, mesh) for t in graph.tensors if t.kind != "var"})
        return partition(program).program


@pytest.fixture(scope="module")
def gpt() -> Model:
    return Model(GPTConfig(layers=2, hidden=64, ffn=256, heads=8, vocab=1024, seq=32))


@pytest.fixture(scope="module")
def llama() -> Model:
    return Model(LlamaConfig(layers=2, hidden=64, ffn=128, heads=8, kv_heads=4, vocab=1024, seq=32))


def spell(value: Value, axes: int) -> str:
    placement = value.placement
    partial = dict(placement.partial)
    dims = placement.dims_mapping
    return ",".join(f"S{dims.index(a)}" if a in dims else "P" if a in partial else "R" for a in range(axes))


def as_op(kernel: Kernel, axes: int, constants: Collection[str] = ()) -> PartitionedOp:
    """A kernel as the truth has it, which leaves out operands that are ``constants``."""
    return PartitionedOp(
        kernel.phase,
        kernel.type,
        tuple(spell(v, axes) for v in kernel.inputs if v.name not in constants),
        tuple(spell(v, axes) for v in kernel.outputs),
    )


def kernels(completion: Completion, phase: str) -> list[Kernel]:
    return [k for work in completion.work for k in (work.forward if phase == "forward" else work.backward)]


@pytest.mark.parametrize("name", MESHES)
def test_every_forward_op_of_gpt_lies_as_in_the_partitioned_program(gpt: Model, name: str) -> None:
    mesh = mesh_of(name)
    mine = [as_op(k, len(mesh.axes)) for k in kernels(gpt.analysis.complete(mesh), "forward")]
    theirs = [op for op in computing_ops(gpt.partitioned(mesh)) if op.phase == "forward"]
    assert mine == theirs


@pytest.mark.parametrize("name", MESHES)
def test_the_backward_ops_of_gpt_are_those_of_the_partitioned_program(gpt: Model, name: str) -> None:
    mesh = mesh_of(name)
    mine = Counter(as_op(k, len(mesh.axes)) for k in kernels(gpt.analysis.complete(mesh), "backward"))
    theirs = Counter(op for op in computing_ops(gpt.partitioned(mesh)) if op.phase == "backward" and op.type != "full_like")
    assert mine == theirs


@pytest.mark.parametrize("name", ["dp2 x mp2", "mp4", "dp4 x mp2", "mp2 x dp4"])
def test_llama_is_completed_as_it_is_partitioned(llama: Model, name: str) -> None:
    mesh = mesh_of(name)
    completion = llama.analysis.complete(mesh)
    axes = len(mesh.axes)
    ops = computing_ops(llama.partitioned(mesh))
    constant = ("full", "arange")  # read nothing but constants
    graph = llama.analysis.graph
    constants = {graph.tensors[t].name for op in graph if op.type == "full" for t in op.results}
    forward = [as_op(k, axes, constants) for k in kernels(completion, "forward") if k.type not in constant]
    assert forward == [op for op in ops if op.phase == "forward" and op.type not in constant]
    backward = Counter(as_op(k, axes, constants) for k in kernels(completion, "backward"))
    assert backward == Counter(op for op in ops if op.phase == "backward" and op.type != "full_like")


def test_equal_layers_share_their_work(gpt: Model) -> None:
    deep = Model(GPTConfig(layers=6, hidden=64, ffn=256, heads=8, vocab=1024, seq=32))
    work = deep.analysis.complete(mesh_of("dp2 x mp4")).work
    assert len(work) == 8
    assert len({id(w) for w in work}) == 4  # embedding, first block, the other blocks, head and loss


def test_one_completion_serves_all_data_parallel_degrees(gpt: Model) -> None:
    two, four = gpt.analysis.complete(mesh_of("dp2 x mp2")), gpt.analysis.complete(mesh_of("dp4 x mp2"))
    assert all(a is b for a, b in zip(two.work, four.work, strict=True))
    assert (two.mesh.shape, four.mesh.shape) == ((2, 2), (4, 2))


def test_what_grows_with_the_batch_is_found(gpt: Model) -> None:
    graph, dims = gpt.trace.graph, gpt.analysis.batch_dims
    assert dims[graph.tensor("tokens").index] == 0
    assert dims[graph.tensor("softmax_0.out").index] == 0
    assert all(t.index not in dims for t in graph.params)
    assert graph.loss not in dims


def test_a_micro_batch_scales_only_what_grows_with_the_batch(gpt: Model) -> None:
    mesh = mesh_of("dp2")
    work = gpt.analysis.complete(mesh).work[1]
    norm = next(k for k in work.forward if k.type == "layer_norm")
    x, weight = norm.inputs[:2]
    assert x.local_shape(mesh, 1.0) == (4, 32, 64)
    assert x.local_shape(mesh, 0.25) == (1, 32, 64)
    assert weight.local_shape(mesh, 0.25) == (64,)


def test_a_partial_value_that_must_be_whole_is_reduced() -> None:
    from paddle_rbt_plugin.completion.collectives import collectives_between

    mesh = mesh_of("dp2 x mp4")
    value = Value("x", (8, 64), "float32", Placement((0, -1), ((1, "sum"),)))
    (reduce,) = collectives_between(value, Placement((0, -1)), mesh, "forward")
    assert (reduce.kind, reduce.axis, reduce.value.local_shape(mesh, 1)) == ("all_reduce", "mp", (4, 64))


def test_a_partial_value_that_must_be_sharded_is_reduce_scattered() -> None:
    from paddle_rbt_plugin.completion.collectives import collectives_between

    mesh = mesh_of("dp2 x mp4")
    value = Value("x", (8, 64), "float32", Placement((0, -1), ((1, "sum"),)))
    (step,) = collectives_between(value, Placement((0, 1)), mesh, "forward")
    assert (step.kind, step.axis, step.value.local_shape(mesh, 1)) == ("reduce_scatter", "mp", (4, 64))


def test_a_shard_moves_by_all_to_all_on_one_axis_and_by_all_gather_on_two() -> None:
    from paddle_rbt_plugin.completion.collectives import collectives_between

    one, two = mesh_of("mp4"), mesh_of("dp2 x mp4")
    rows = Value("x", (8, 64), "float32", Placement((0, -1)))
    (move,) = collectives_between(rows, Placement((-1, 0)), one, "forward")
    assert (move.kind, move.value.local_shape(one, 1)) == ("all_to_all", (2, 64))
    (gather,) = collectives_between(rows, Placement((-1, 0)), two, "forward")
    assert (gather.kind, gather.value.local_shape(two, 1)) == ("all_gather", (8, 64))
    assert collectives_between(rows, Placement((0, 1)), two, "forward") == ()


def test_two_gathered_dimensions_are_gathered_the_last_one_first() -> None:
    from paddle_rbt_plugin.completion.collectives import collectives_between

    mesh = mesh_of("dp2 x mp4")
    steps = collectives_between(Value("x", (8, 64), "float32", Placement((0, 1))), Placement((-1, -1)), mesh, "forward")
    assert [(s.kind, s.axis, s.value.local_shape(mesh, 1)) for s in steps] == [
        ("all_gather", "mp", (4, 64)),
        ("all_gather", "dp", (8, 64)),
    ]
