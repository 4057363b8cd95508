"""``einsum`` written as sums, transposes and a matrix product, which Paddle shards and patterns know."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from string import ascii_letters

from paddle_rbt_plugin.graph.steps import Shape, Step


def einsum_steps(equation: str, shapes: Sequence[Shape], dtype: str) -> tuple[Step, ...]:
    """The steps that compute ``equation`` of operands with these shapes; none for more than two operands, and where an operand
    has a letter twice (a diagonal).

    Of two operands the product is [batch, rows, contracted] times [batch, contracted, columns]. A dimension that one operand
    alone has, and not the result, is summed up first; several that are rows, columns or contracted are made one."""
    operands, out = _spelt_out(equation, shapes)
    if len(operands) > 2 or any(len(set(part)) < len(part) for part in (*operands, out)):
        return ()
    return _Steps(operands, shapes, out, dtype).made()


def _spelt_out(equation: str, shapes: Sequence[Shape]) -> tuple[list[str], str]:
    """The letters of the operands and of the result, ``...`` replaced by letters of its own."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    unused = [n for n in ascii_letters if n not in equation]
    most = max((len(s) - len(o.replace("...", "")) for o, s in zip(operands, shapes, strict=True) if "..." in o), default=0)

    def spelt(part: str, ndim: int) -> str:
        count = ndim - len(part.replace("...", ""))
        return part.replace("...", "".join(unused[most - count : most])) if "..." in part else part

    spelt_operands = [spelt(o, len(s)) for o, s in zip(operands, shapes, strict=True)]
    dots = "".join(unused[:most])
    if arrow:
        return spelt_operands, out.replace("...", dots)
    every = "".join(spelt_operands)
    return spelt_operands, dots + "".join(sorted(n for n in set(every) - set(dots) if every.count(n) == 1))


class _Steps:
    def __init__(self, operands: Sequence[str], shapes: Sequence[Shape], out: str, dtype: str):
        self.operands, self.out, self.dtype = operands, out, dtype
        self.size: dict[str, int] = {}
        for letters, shape in zip(operands, shapes, strict=True):
            for letter, n in zip(letters, shape, strict=True):
                self.size[letter] = max(n, self.size.get(letter, 1))
        self.shapes = shapes
        self.steps: list[Step] = []

    def made(self) -> tuple[Step, ...]:
        given = [pair for own in zip(self.operands, self.shapes, strict=True) for pair in zip(*own, strict=True)]
        if any(self.size[letter] != n for letter, n in given):
            return ()  # a dimension of size 1 is broadcast
        if len(self.operands) == 1:
            ref, letters = self._summed(-1, self.operands[0], self.out)
            self._arranged(ref, letters, self.out, self._sizes(*self.out))
            return tuple(self.steps)
        one, other = self.operands
        x, one = self._summed(-1, one, other + self.out)
        y, other = self._summed(-2, other, one + self.out)
        batch = "".join(n for n in self.out if n in one and n in other)
        rows, columns = ("".join(n for n in self.out if n in own and n not in batch) for own in (one, other))
        contracted = "".join(n for n in one if n in other and n not in self.out)
        x = self._arranged(x, one, batch + rows + contracted, self._sizes(*batch, rows, contracted))
        y = self._arranged(y, other, batch + contracted + columns, self._sizes(*batch, contracted, columns))
        shape = self._sizes(*batch, rows, columns)
        ref = self._step("matmul", {"x": x, "y": y}, {"transpose_x": False, "transpose_y": False}, shape)
        split = self._sizes(*batch, *rows, *columns)
        if split != shape:
            ref = self._step("reshape", {"x": ref}, {"shape": split}, split)
        self._arranged(ref, batch + rows + columns, self.out, self._sizes(*self.out))
        return tuple(self.steps)

    def _summed(self, ref: int, letters: str, kept: str) -> tuple[int, str]:
        gone = tuple(i for i, n in enumerate(letters) if n not in kept)
        if not gone:
            return ref, letters
        left = "".join(n for n in letters if n in kept)
        return self._step("sum", {"x": ref}, {"axis": gone, "dtype": self.dtype, "keepdim": False}, self._sizes(*left)), left

    def _arranged(self, ref: int, have: str, want: str, shape: Shape) -> int:
        if have != want:
            perm = tuple(have.index(n) for n in want)
            ref = self._step("transpose", {"x": ref}, {"perm": perm}, self._sizes(*want))
        return ref if self._sizes(*want) == shape else self._step("reshape", {"x": ref}, {"shape": shape}, shape)

    def _step(self, type_: str, inputs: dict[str, int], attrs: dict[str, object], shape: Shape) -> int:
        self.steps.append(Step(type_, inputs, attrs, shape))
        return len(self.steps) - 1

    def _sizes(self, *groups: str) -> Shape:
        return tuple(prod(self.size[n] for n in group) for group in groups)
