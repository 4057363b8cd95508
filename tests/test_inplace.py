"""Values that are changed in place and read again, which static programs compute otherwise than the model, are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F
from paddle.static import InputSpec

import paddle_rbt_plugin as rbt
from paddle_rbt_plugin.handover.pir.inplace import check_in_place
from paddle_rbt_plugin.handover.pir.trace import trace_layer


class Network(nn.Layer):
    def __init__(self, change: Callable[[Any], Any]):
        super().__init__()
        self.first, self.norm, self.change = nn.Linear(8, 8), nn.BatchNorm1D(8), change

    def forward(self, x: Any) -> Any:
        return self.change(self.norm(self.first(x))).square().mean()


def without_first(h: Any) -> Any:
    h[:, 0] = 0.0
    return h


def read_before_and_after(h: Any) -> Any:
    mask = h.detach().clone()
    mask[:, 0] = 0.0
    mask[:, 2:4] = mask[:, 4:6]
    return h * mask


def added(h: Any) -> Any:
    changed = h.add_(h.detach())
    return changed + h


def in_place(h: Any) -> Any:
    return F.relu_(h)


def with_constant(h: Any) -> Any:
    return h * paddle.to_tensor([1.0] * 8)


def program(change: Callable[[Any], Any]) -> Any:
    return trace_layer(Network(change), [InputSpec([4, 8], "float32", "x")]).program


@pytest.mark.parametrize(("change", "message"), [(without_first, "set_value_"), (read_before_and_after, "set_value_")])
def test_a_change_that_static_programs_do_not_follow_is_refused(change: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(rbt.UnsupportedProgram, match=message):
        check_in_place(program(change))


@pytest.mark.parametrize("change", [in_place, added, with_constant])
def test_other_ops_in_place_are_not(change: Callable[[Any], Any]) -> None:
    check_in_place(program(change))
