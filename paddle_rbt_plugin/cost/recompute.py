"""Which ops of a recomputed region backward runs again.

The region is a block or an attention core. What it reads from outside was brought to where it is needed by the forward pass, so
only values made inside communicate again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from paddle_rbt_plugin.completion.work import Kernel
from paddle_rbt_plugin.graph.random_ops import draws, draws_again_the_same


def keeps_its_results(kernel: Kernel) -> bool:
    """Whether an op is left out of recomputation, since it would draw other random numbers."""
    return draws(kernel.type, kernel.attrs) and not draws_again_the_same(kernel.type)


def run_again(kernels: Sequence[Kernel], region: Collection[int], whole: bool) -> dict[int, Kernel]:
    """The kernels of a forward pass at the positions ``region`` that backward runs again, by position. Unless it runs the
    ``whole`` region, those whose results no other of them reads are left out, as by Paddle's ``auto_parallel_recompute_pir``;
    their operands are brought to them nevertheless. Ops that keep their results are left out altogether."""
    positions = [i for i in sorted(region) if whole or not keeps_its_results(kernels[i])]
    made = {v.name for i in positions for v in kernels[i].outputs}
    read = {v.name for i in positions for v in kernels[i].inputs}
    again = {}
    for i in positions:
        kernel, own = kernels[i], {v.name for v in kernels[i].outputs}
        needed = whole or i == positions[0] or not own.isdisjoint(read)
        arriving = tuple(c for c in kernel.collectives if c.value.name in (made if needed else made - own))
        again[i] = replace(kernel, collectives=arriving) if needed else Kernel("reshard", kernel.phase, (), (), arriving)
    return again
