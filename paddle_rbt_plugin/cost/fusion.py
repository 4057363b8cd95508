"""What each kernel of a pass reads and writes in device memory, with or without fusion.

Left alone, every op reads its operands and writes its results. A gradient op does not read a forward value that is not kept
for it: it only wants its shape. The libraries that large models are trained with fuse runs of ops into one kernel, as a
compiler for elementwise ops does (CINN, the JIT-fused kernels of arXiv 2205.05198 and Megatron-LM): a value that only the
next op reads then never goes through memory. Two kinds of runs are fused:

- the end of a matrix product: scaling, adding a bias, and writing the result in another order;
- elementwise ops, up to and including a softmax.

A value that the backward of the op before or after needs is written all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from paddle_rbt_plugin.completion.work import Kernel, Value
from paddle_rbt_plugin.cost.op_types import ELEMENTWISE, MATMULS, VIEWS, forward_type

_READS_NO_OPERAND = frozenset({"add", "subtract", "scale", "cast", "dropout", "softmax", "transpose"})
"""Ops whose gradient does not read their operands."""
_READS_RESULT = frozenset({"softmax", "tanh", "relu", "sigmoid", "exp", "sqrt", "rsqrt", "reciprocal"})
"""Ops whose gradient reads their result."""


@dataclass(frozen=True)
class Traffic:
    """Values that a kernel reads and writes in memory; ``launched`` is False for an op that runs inside another's kernel."""

    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    launched: bool


def pass_traffic(kernels: Sequence[Kernel], saved: Collection[str], fused: bool) -> tuple[Traffic, ...]:
    """The traffic of each kernel of a pass; ``saved`` names the forward values that backward may read."""
    kept_inputs = [_operands(kernel, saved) for kernel in kernels]
    if not fused:
        return tuple(
            Traffic(reads, kernel.outputs, forward_type(kernel.type) not in VIEWS)
            for kernel, reads in zip(kernels, kept_inputs, strict=True)
        )
    return _Fusion(kernels, kept_inputs).traffic()


def _operands(kernel: Kernel, saved: Collection[str]) -> tuple[Value, ...]:
    if kernel.phase == "forward":
        return kernel.inputs
    return tuple(v for v in kernel.inputs if v.kind == "param" or v.name.endswith("@GRAD") or v.name in saved)


class _Fusion:
    """One scan over a pass that lets each kernel join the run of the kernel before it in the data flow.

    Ops that only rename their operand are seen through: reshapes, and the gradient of an addition, which is the arriving
    gradient itself. Where that is summed for a bias, the sum is a kernel of its own that reads it."""

    def __init__(self, kernels: Sequence[Kernel], operands: Sequence[tuple[Value, ...]]):
        self.kernels = kernels
        self.alias: dict[str, str] = {}
        self.reads = [self._rename(k, read) for k, read in zip(kernels, operands, strict=True)]
        self.readers = Counter(self._name(v) for read in self.reads for v in read)
        self.run: dict[str, str] = {}
        """Kind of the run that a value comes out of: ``product`` or ``elementwise``."""
        self.maker: dict[str, Kernel] = {}

    def traffic(self) -> tuple[Traffic, ...]:
        unwritten: set[str] = set()
        result = []
        for kernel, read in zip(self.kernels, self.reads, strict=True):
            inside = [v for v in read if self._joins(kernel, v)]
            kinds = {self.run[self._name(v)] for v in inside}
            if len(kinds) > 1:  # the ends of different runs meet: none goes on
                inside = []
            kind = kinds.pop() if len(kinds) == 1 else self._starts(kernel)
            unwritten |= {self._name(v) for v in inside if self._is_transient(kernel, self._name(v))}
            made = tuple(v for v in kernel.outputs if self._name(v) == v.name)
            for v in made:
                self.maker[v.name] = kernel
                if kind:
                    self.run[v.name] = kind
            launched = not inside and bool(made)
            result.append(Traffic(tuple(v for v in read if v not in inside), made, launched))
        return tuple(replace(t, writes=tuple(v for v in t.writes if v.name not in unwritten)) for t in result)

    def _name(self, value: Value) -> str:
        return self.alias.get(value.name, value.name)

    def _rename(self, kernel: Kernel, read: tuple[Value, ...]) -> tuple[Value, ...]:
        """Notes the results of a kernel that are its operand, and returns what it reads all the same."""
        type = forward_type(kernel.type)
        if type in VIEWS and kernel.inputs:
            whole = kernel.inputs[0] if type == kernel.type else kernel.inputs[-1]
            self.alias |= {v.name: self._name(whole) for v in kernel.outputs}
            return ()
        if type in {"add", "subtract"} and type != kernel.type:
            arriving = kernel.inputs[-1]
            same = [v for v in kernel.outputs if v.shape == arriving.shape]
            self.alias |= {v.name: self._name(arriving) for v in same}
            return (arriving,) if len(same) < len(kernel.outputs) else ()
        return read

    def _starts(self, kernel: Kernel) -> str:
        type = forward_type(kernel.type)
        if type in MATMULS:
            return "product"
        return "elementwise" if type in ELEMENTWISE or type == "softmax" else ""

    def _joins(self, kernel: Kernel, value: Value) -> bool:
        """True if the kernel takes the value over from the run that makes it."""
        name, type = self._name(value), forward_type(kernel.type)
        kind = self.run.get(name)
        if not kind or self.readers[name] > 1 or any(self._name(c.value) == name for c in kernel.collectives):
            return False
        if kind == "elementwise":
            return type in ELEMENTWISE or (type == "softmax" and type == kernel.type)
        adds_bias = type == "add" and any(v.kind == "param" and len(v.shape) == 1 for v in kernel.inputs)
        return type in {"scale", "transpose"} or adds_bias

    def _is_transient(self, kernel: Kernel, name: str) -> bool:
        """True if nobody needs the value once the kernel has taken it over."""
        if kernel.phase == "backward":
            return True
        return forward_type(kernel.type) in _READS_NO_OPERAND and self.maker[name].type not in _READS_RESULT
