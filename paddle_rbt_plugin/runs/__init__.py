"""Tables of training runs: read, predicted through the product's own path, and compared with what was measured."""

from paddle_rbt_plugin.runs.predict import Predictor, estimate_runs
from paddle_rbt_plugin.runs.score import Score, score_runs
from paddle_rbt_plugin.runs.table import TrainingRun, read_runs

__all__ = ["Predictor", "Score", "TrainingRun", "estimate_runs", "read_runs", "score_runs"]
