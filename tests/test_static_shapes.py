"""Known shapes that a program reads by ``paddle.shape`` are constants: planned, and equal in value."""

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.graph import read_program
from paddle_rbt_plugin.handover.pir.static_shapes import make_shapes_static, with_static_shapes

Use = Callable[[Any, Any], Any]
USES: dict[str, Use] = {
    "slice": lambda h, s: h + paddle.ones(s[:-1], "float32").unsqueeze(-1),
    "element": lambda h, s: h + paddle.full([s[0], s[1], 64], 1.0, "float32"),
    "reshape": lambda h, s: h.reshape([s[0] * s[1], 8, -1]),
    "arithmetic": lambda h, s: h.reshape([s[0], s[1] // 4, 4 * s[2]]),
    "cast and concat": lambda h, s: h.reshape(paddle.concat([s[:2].astype("int32"), paddle.full([2], 8, "int32")])),
    "mask": lambda h, s: h.matmul(h, transpose_y=True) + paddle.tril(paddle.ones([s[1], s[1]])),
    "arange": lambda h, s: h + paddle.arange(s[1]).astype("float32").unsqueeze(-1),
    "value": lambda h, s: h * s[0].astype("float32"),
}


def built(use: Use) -> tuple[Any, Any]:
    """A program of known shapes, and its loss."""
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        x = paddle.static.data("x", [8, 32, 64], "float32")
        h = x * 2
        return main, use(h, paddle.shape(h)).mean()


def loss_of(program: Any, loss: Any) -> float:
    x = np.random.default_rng(0).standard_normal((8, 32, 64)).astype("float32")
    return float(paddle.static.Executor(paddle.CPUPlace()).run(program, feed={"x": x}, fetch_list=[loss])[0])


@pytest.fixture(autouse=True)
def _static_mode() -> Any:
    paddle.enable_static()
    yield
    paddle.disable_static()


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_shape_that_is_known_becomes_a_constant_and_the_loss_stays_the_same(use: Use) -> None:
    program, loss = built(use)
    before, ops = loss_of(program, loss), [op.name() for op in program.global_block().ops]
    static, its_loss = with_static_shapes(program, loss)
    graph = read_program(static, its_loss)
    assert not any(op.type == "shape" or op.type == "shape64" for op in graph.ops)
    assert loss_of(static, its_loss) == pytest.approx(before, rel=1e-6)
    assert [op.name() for op in program.global_block().ops] == ops, "the caller's program is the caller's"
    assert loss_of(program, loss) == before


def test_a_program_that_reads_no_shape_is_not_copied() -> None:
    program, loss = built(lambda h, s: h)
    make_shapes_static(program)  # nothing reads the shape, which goes
    assert with_static_shapes(program, loss) == (program, loss)


def test_a_shape_that_depends_on_values_is_refused() -> None:
    program, loss = built(lambda h, s: paddle.masked_select(h, h > 0) + paddle.zeros(s[:1])[0])
    with pytest.raises(rbt.UnsupportedProgram, match="depend on values, as of masked_select"):
        rbt.tune(program, loss=loss, cluster="1x2:A100-80G")


def test_a_traced_layer_that_reads_shapes_is_planned_as_one_with_numbers() -> None:
    class Net(nn.Layer):
        def __init__(self, reads: bool) -> None:
            super().__init__()
            self.up, self.down, self.reads = nn.Linear(64, 256), nn.Linear(256, 64), reads

        def forward(self, x: Any) -> Any:
            h = self.down(nn.functional.gelu(self.up(x)))
            shape = paddle.shape(h) if self.reads else h.shape
            return h.reshape([shape[0], shape[1], 8, 8]).square().mean()

    paddle.disable_static()
    spec = [paddle.static.InputSpec([8, 32, 64], "float32", "x")]
    plans = [rbt.tune(Net(reads), input_spec=spec, cluster="1x4:A100-80G") for reads in (True, False)]
    assert plans[0].estimate == plans[1].estimate
    assert plans[0].signature == plans[1].signature
