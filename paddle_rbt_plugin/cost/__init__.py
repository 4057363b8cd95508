"""Cost: step time and peak memory of a completed candidate."""

from paddle_rbt_plugin.cost.candidate import Candidate, Precision, Recompute, Schedule, Training
from paddle_rbt_plugin.cost.constants import DEFAULT, Constants
from paddle_rbt_plugin.cost.estimate import Estimate, StageEstimate, estimate

__all__ = [
    "DEFAULT",
    "Candidate",
    "Constants",
    "Estimate",
    "Precision",
    "Recompute",
    "Schedule",
    "StageEstimate",
    "Training",
    "estimate",
]
