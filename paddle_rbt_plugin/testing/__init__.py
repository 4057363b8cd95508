"""A test kit for authors of patterns; every function works in pytest as it stands.

    from paddle_rbt_plugin.testing import assert_consistent, assert_matches, assert_same_loss

    def test_the_pattern():
        assert_matches(MyPattern, Model(), input_spec, count=12)
        assert_consistent(MyPattern, Model(), input_spec, degrees={"dp": 2, "mp": 2})
        assert_same_loss(build_model, MyPattern)

A pattern is its class, installed or not, or the name of an installed one. A model is a ``paddle.nn.Layer`` with its
``input_spec`` (and ``loss`` and ``labels_spec`` where forward does not return the loss), a static Program, a ``Graph``, or what
``paddle-rbt plan`` takes as MODEL. What fails is an AssertionError that says what came of the pattern and what to do.
"""

from paddle_rbt_plugin.pattern.report import MatchReport
from paddle_rbt_plugin.testing.consistency import assert_consistent, inconsistencies
from paddle_rbt_plugin.testing.matching import assert_matches, match_pattern
from paddle_rbt_plugin.testing.training import LossComparison, assert_same_loss, compare_losses

__all__ = [
    "LossComparison",
    "MatchReport",
    "assert_consistent",
    "assert_matches",
    "assert_same_loss",
    "compare_losses",
    "inconsistencies",
    "match_pattern",
]
