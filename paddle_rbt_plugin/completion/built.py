"""What the oracle answers: the ops that Paddle builds, with the placements that they need and make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.question import Operand


@dataclass(frozen=True)
class Source:
    """Where an operand of a built op comes from: ``input``, ``output`` or ``gradient`` (of an output) number ``index`` of the
    question, or ``local``: result ``index`` counted over all built ops."""

    kind: str
    index: int


class Use(NamedTuple):
    """One operand of a built op: its placement, and the placement that the op needs."""

    source: Source
    shape: tuple[int, ...]
    dtype: str
    have: Placement
    need: Placement
    reads: bool = True
    """False for a gradient op that needs only the shape, so the values need not be kept."""


class Product(NamedTuple):
    """One result of a built op: the placement that the op makes, and the placement that its readers get."""

    shape: tuple[int, ...]
    dtype: str
    made: Placement
    kept: Placement
    gradient_of: int | None = None
    """The input whose gradient it is."""


@dataclass(frozen=True)
class Built:
    """An op that Paddle built for a question."""

    type: str
    uses: tuple[Use, ...]
    products: tuple[Product, ...]
    attrs: Mapping[str, Any]

    def with_dtype(self, dtype: str) -> Built:
        """The same op with every float32 value in ``dtype``."""
        uses = tuple(u._replace(dtype=dtype) if u.dtype == "float32" else u for u in self.uses)
        products = tuple(p._replace(dtype=dtype) if p.dtype == "float32" else p for p in self.products)
        return replace(self, uses=uses, products=products)

    def from_operands(self, operands: Sequence[Operand]) -> Built:
        """The same op when its operands arrive with other placements and the op reshards them itself."""
        return replace(self, uses=tuple(u._replace(have=operands[u.source.index].placement) for u in self.uses))

    def with_gradients_of(self, operands: Sequence[Operand]) -> Built:
        """The same gradient op when each gradient is brought to the placement of its operand."""

        def returned(product: Product) -> Product:
            if product.gradient_of is None:
                return product
            return product._replace(kept=product.made.of_gradient(operands[product.gradient_of].placement))

        return replace(self, products=tuple(map(returned, self.products)))
