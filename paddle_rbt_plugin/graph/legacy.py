"""Reads a legacy ``static.Program`` into a graph.

Paddle knows itself what a legacy op is called in PIR: its translator turns a Program into a PIR program and keeps a map from
variable names to values. So the canonical names, slots and attributes are Paddle's own for every op it can translate, and
the rest is the work of the PIR reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paddle_rbt_plugin.errors import UnsupportedProgram
from paddle_rbt_plugin.graph.graph import Graph
from paddle_rbt_plugin.graph.pir import Reader

_CONTROL_FLOW = ("while", "conditional_block", "conditional_block_infer", "recurrent", "py_func", "pylayer")
_FEED_OPS = ("feed", "fetch", "data")
# Fused ops of the legacy attention: what they are to patterns and completion, the fusion being a matter of the kernel.
_ALIASES = {"fused_softmax_mask_upper_triangle": ("softmax", {"axis": -1})}
_FORWARD_ROLES = (0, 256)  # OpRole.Forward, OpRole.Forward | OpRole.Loss


@dataclass(frozen=True)
class LegacyGraph:
    """A graph read from a legacy program. ``Op.source`` is the position of the op in the global block."""

    graph: Graph
    variables: Mapping[int, str]
    """Name of the program's variable for each tensor of the graph that is one."""


def read_legacy_program(
    program: Any, loss: Any = None, structured_names: Mapping[str, str] | None = None, needs_loss: bool = True
) -> LegacyGraph:
    """Graph of a serial forward legacy program, with its variables; see ``read_program``. ``loss`` may be a name. Raises
    UnsupportedProgram."""
    ops = [op for op in program.global_block().ops if op.type not in _FEED_OPS]
    _check(program, ops)
    translated, values = _translate(program)
    name = getattr(loss, "name", loss)
    if name is not None and name not in values:
        raise UnsupportedProgram(f"the loss given, {name!r}, is not a variable of the program")
    reader = _LegacyReader(translated, structured_names or {})
    graph = reader.read(None if name is None else values[name], needs_loss)
    variables = {reader.index_of[v.id]: var for var, v in values.items() if v.id in reader.index_of}
    variables |= {t.index: t.name for t in graph.tensors if t.kind != "var"}
    return LegacyGraph(_with_sources(graph, program, variables), variables)


def _check(program: Any, ops: list[Any]) -> None:
    if not ops:
        raise UnsupportedProgram(
            "the program is empty: it holds no operation to plan; build the model's forward pass in it first"
        )
    for op in ops:
        if op.type.endswith("_grad") or op.attr("op_role") not in _FORWARD_ROLES:
            raise UnsupportedProgram(
                f"the program is not a forward program: it holds {op.type}; give the program as it is before "
                "append_backward and optimizer.minimize"
            )
        if op.type in _CONTROL_FLOW:
            raise UnsupportedProgram(
                f"the program holds control flow ({op.type}), which a static plan cannot shard; build the model "
                "with branches and loops that do not depend on tensor values"
            )
    if program.num_blocks > 1:
        raise UnsupportedProgram("the program holds control flow (more than one block), which a static plan cannot shard")


def _translate(program: Any) -> tuple[Any, dict[str, Any]]:
    """The program in PIR and, per variable, the value it was last given."""
    import paddle

    pir = paddle.base.libpaddle.pir
    clone = program.clone()
    block = clone.global_block()
    fed = {name for op in block.ops if op.type in _FEED_OPS for name in op.output_arg_names}
    for name, var in reversed(program.global_block().vars.items()):  # each is put in front of the others
        if var.is_data and name not in fed:
            attrs = {"shape": list(var.shape), "dtype": var.dtype, "place": 0, "name": name}
            block._prepend_op(type="data", inputs={}, outputs={"out": block.vars[name]}, attrs=attrs)
    try:
        pir.translate_to_pir(clone.desc)  # registers the dialects, without which 2.6 cannot make the map
        translated, values = pir.translate_to_pir_with_param_map(clone.desc)
    except Exception as error:  # Paddle's own exceptions have no common base
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UnsupportedProgram(f"Paddle cannot translate the program to PIR: {' '.join(lines[-2:])[:300]}") from error
    return translated, {name: found[-1] for name, found in values.items() if found}


class _LegacyReader(Reader):
    """Legacy variables are marked as stopping gradients by hand only; PIR also stops them where nothing flows in."""

    def _op(self, source: int, op: Any) -> None:
        super()._op(source, op)
        new = self.ops[-1]
        if new.type in _ALIASES:
            type_, attrs = _ALIASES[new.type]
            new = replace(new, type=type_, attrs=attrs, inputs={"x": new.operands}, outputs={"out": new.results})
            self.ops[-1] = new
        stops = all(self.tensors[t].stop_gradient for t in new.operands)
        stops = stops or all(self.tensors[t].stop_gradient for t in new.results)
        for t in new.results:
            self.tensors[t] = replace(self.tensors[t], stop_gradient=stops)


def _with_sources(graph: Graph, program: Any, variables: Mapping[int, str]) -> Graph:
    """The graph with positions in the legacy block: an op stands where its results are written."""
    written = {name: i for i, op in enumerate(program.global_block().ops) for name in op.output_arg_names}
    ops = []
    for op in graph.ops:
        sources = [written[variables[t]] for t in op.results if variables.get(t) in written]
        ops.append(replace(op, source=sources[0] if sources else -1))
    return graph.rewritten(graph.tensors, tuple(ops), graph.loss)
