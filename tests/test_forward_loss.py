"""Models whose forward returns the loss train and evaluate as they do serially, though no loss is given."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from launching import launch

from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.engine.forward_loss import _takes, forward_loss


@pytest.mark.slow
def test_a_forward_that_returns_the_loss_trains_and_evaluates_as_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "serial").mkdir()
    (tmp_path / "parallel").mkdir()
    right = launch("forward_loss.py", 1, tmp_path / "serial" / "out.json")
    found = launch("forward_loss.py", 2, tmp_path / "parallel" / "out.json")
    assert len(found) == 9
    for name, seen in found.items():
        expected = right[f"{name.split(',')[0]}, serial"]
        if "trained" in seen:
            assert seen["trained"] == pytest.approx(expected["trained"], rel=1e-5), name
        else:
            assert seen["last"] == pytest.approx(expected["trained"][-1], rel=1e-5), name
        if "evaluated" in seen:
            whole = expected["evaluated"]
            assert np.mean(seen["evaluated"]) == pytest.approx(_as_reported(seen["evaluated"], whole), rel=1e-5), name


def _as_reported(seen: list[float] | float, whole: list[float]) -> float:
    """The engine reports one number for the set: the mean, or, as Paddle does by itself, the loss of the last batch."""
    if isinstance(seen, list):
        return float(np.mean(whole))
    return min((float(np.mean(whole)), whole[-1]), key=lambda loss: abs(loss - seen))


def test_the_loss_is_the_first_output_or_that_of_a_dict() -> None:
    loss = paddle.to_tensor(1.0)
    assert forward_loss(loss, paddle.ones([4, 2])) is loss
    assert forward_loss({"logits": None, "loss": loss}) is loss


@pytest.mark.parametrize("outputs", [(paddle.ones([4, 2]),), (), ({"logits": 1},), (None,)])
def test_a_forward_without_a_loss_is_an_error_that_says_what_it_returned(outputs) -> None:
    with pytest.raises(TunerError, match=r"no loss is given, .* (of shape \[4, 2\]|no tensor); pass a loss"):
        forward_loss(*outputs)


def test_labels_are_given_to_a_forward_that_takes_them() -> None:
    model = SimpleNamespace(forward=lambda x, labels=None: None)
    assert _takes(model, 1) and _takes(model, 2) and not _takes(model, 3)
    assert _takes(SimpleNamespace(forward=lambda *tensors: None), 9)
