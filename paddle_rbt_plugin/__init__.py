"""Finds parallel strategies for PaddlePaddle models from plugin patterns and hands them to Paddle's auto-parallel framework.

Importing it registers the pass ``rule_based_tuner`` and the fields of ``strategy.tuning``.
"""

import warnings

try:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No ccache found")  # relevant only when compiling custom ops
        import paddle as _paddle  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "paddle":
        raise
    raise ModuleNotFoundError(
        "paddle-rbt-plugin needs PaddlePaddle: install 'paddle-rbt-plugin[cpu]' or 'paddle-rbt-plugin[gpu]'", name="paddle"
    ) from None

from paddle_rbt_plugin.api import bind_methods, tune
from paddle_rbt_plugin.cluster import Cluster
from paddle_rbt_plugin.cost import CostModel, Prediction
from paddle_rbt_plugin.errors import (
    ClusterError,
    CostModelError,
    HandoverError,
    ModelError,
    NoFeasiblePlan,
    PatternError,
    PlanError,
    TunerError,
    TunerWarning,
    TuningFinished,
    UnsupportedProgram,
)
from paddle_rbt_plugin.handover.checkpoint import load_checkpoint, save_checkpoint
from paddle_rbt_plugin.handover.engine.hooks import engine_plan, install_hooks
from paddle_rbt_plugin.handover.legacy.ops import legacy_static_ops
from paddle_rbt_plugin.handover.shared.replicas import check_replicas
from paddle_rbt_plugin.pattern import Pattern
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.plugins import hookimpl, hookspec, parse_cluster

bind_methods()
install_hooks()

__all__ = [
    "Cluster",
    "ClusterError",
    "CostModel",
    "CostModelError",
    "HandoverError",
    "ModelError",
    "NoFeasiblePlan",
    "Pattern",
    "PatternError",
    "Plan",
    "PlanError",
    "Prediction",
    "TunerError",
    "TunerWarning",
    "TuningFinished",
    "UnsupportedProgram",
    "check_replicas",
    "engine_plan",
    "hookimpl",
    "hookspec",
    "legacy_static_ops",
    "load_checkpoint",
    "parse_cluster",
    "save_checkpoint",
    "tune",
]
