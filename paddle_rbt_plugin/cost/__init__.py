"""Cost: step time and peak memory of a completed candidate."""

from paddle_rbt_plugin.cost.candidate import Candidate, Precision, Recompute, Schedule, Training
from paddle_rbt_plugin.cost.constants import DEFAULT, Constants
from paddle_rbt_plugin.cost.estimates import Estimate, StageEstimate, estimate
from paddle_rbt_plugin.cost.model import Case, CostModel, Prediction

__all__ = [
    "DEFAULT",
    "Candidate",
    "Case",
    "Constants",
    "CostModel",
    "Estimate",
    "Precision",
    "Prediction",
    "Recompute",
    "Schedule",
    "StageEstimate",
    "Training",
    "estimate",
]
