"""Graphs for the tests of patterns, written by hand or traced from a model."""

from __future__ import annotations

from typing import Any

from paddle_rbt_plugin.graph import Graph, Op, Tensor


class GraphWriter:
    """Writes a graph op by op; tensors are passed around by position."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []

    def param(self, *shape: int) -> int:
        return self._tensor("param", shape)

    def data(self, *shape: int) -> int:
        return self._tensor("data", shape)

    def op(self, type_: str, *operands: int, shape: tuple[int, ...] = (8, 16, 64), **attrs: Any) -> int:
        out = self._tensor("var", shape)
        inputs = {f"x{i}": (t,) for i, t in enumerate(operands)}
        self.ops.append(Op(len(self.ops), f"{type_}_{len(self.ops)}", type_, inputs, {"out": (out,)}, attrs))
        return out

    def linear(self, x: int, width_in: int, width_out: int, bias: bool = True) -> int:
        h = self.op("matmul", x, self.param(width_in, width_out), transpose_x=False, transpose_y=False)
        return self.op("add", h, self.param(width_out)) if bias else h

    def graph(self) -> Graph:
        return Graph(tuple(self.tensors), tuple(self.ops))

    def _tensor(self, kind: Any, shape: tuple[int, ...]) -> int:
        index = len(self.tensors)
        self.tensors.append(Tensor(index, f"{kind}_{index}", tuple(shape), "float32", kind))
        return index


def self_attention(w: GraphWriter, x: int, bias: bool = True, context: int | None = None) -> int:
    """Attention of [8, 16, 64] with 4 heads, its output projection included; cross attention where ``context`` is given."""
    heads = []
    for source in (x, x if context is None else context, x if context is None else context):
        h = w.op("reshape", w.linear(source, 64, 64, bias), shape=(8, 16, 4, 16))
        heads.append(w.op("transpose", h, shape=(8, 4, 16, 16)))
    scores = w.op("scale", w.op("matmul", heads[0], heads[1], transpose_y=True, shape=(8, 4, 16, 16)), shape=(8, 4, 16, 16))
    weights = w.op("softmax", scores, shape=(8, 4, 16, 16))
    out = w.op("transpose", w.op("matmul", weights, heads[2], shape=(8, 4, 16, 16)), shape=(8, 16, 4, 16))
    return w.linear(w.op("reshape", out), 64, 64, bias)


def traced(config: Any, batch: int = 8) -> Graph:
    """Graph of a model of ``paddle_rbt_plugin.models``, read from the program that Paddle traces."""
    import paddle

    from paddle_rbt_plugin.graph import read_program
    from paddle_rbt_plugin.models import build, input_spec

    paddle.enable_static()
    try:
        main, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
            inputs = [paddle.static.data(s.name, s.shape, s.dtype) for s in input_spec(config, batch)]
            loss = build(config)(*inputs)
        return read_program(main, loss)
    finally:
        paddle.disable_static()
