"""The public functions: ``rbt.tune``, and the methods of ``Plan`` that explain and execute a plan.

The module is above the planner and hand-over. ``tune`` traces or reads its argument, and passes a graph and a request to the
planner; ``bind_methods`` binds functions of higher packages to ``Plan``, which is plain data.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from paddle import nn

from paddle_rbt_plugin.config import Settings
from paddle_rbt_plugin.errors import TunerError, UnsupportedProgram
from paddle_rbt_plugin.graph import Graph, is_legacy, read_program
from paddle_rbt_plugin.graph.legacy import read_legacy_program
from paddle_rbt_plugin.handover.dygraph import sharding
from paddle_rbt_plugin.handover.legacy.judge import tune_legacy
from paddle_rbt_plugin.handover.pir.static_shapes import with_static_shapes
from paddle_rbt_plugin.handover.pir.trace import trace_layer, with_batch
from paddle_rbt_plugin.handover.shared.replicas import check_layer
from paddle_rbt_plugin.handover.shared.strategy import to_strategy
from paddle_rbt_plugin.plan.explain import explain
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.request import Request
from paddle_rbt_plugin.search import Watcher
from paddle_rbt_plugin.tuner import collection_paused, tune_graph

METHODS = {
    "explain": explain,
    "shard_layer": sharding.shard_layer,
    "shard_optimizer": sharding.shard_optimizer,
    "shard_dataloader": sharding.shard_dataloader,
    "check_replicas": check_layer,
    "to_strategy": to_strategy,
}
"""The methods that ``Plan`` declares, and the functions that implement them."""


def bind_methods() -> None:
    """Binds ``METHODS`` to ``Plan``, which keeps the documentation, signatures and types that it declares."""
    for name, function in METHODS.items():
        declared = getattr(Plan, name)

        def method(self: Plan, *args: Any, _function: Any = function, **kwargs: Any) -> Any:
            if _function is not explain:
                self.check_executable()
            return _function(self, *args, **kwargs)

        setattr(Plan, name, functools.wraps(declared)(method))


def tune(
    program: Any,
    *,
    input_spec: Sequence[Any] | None = None,
    labels_spec: Sequence[Any] = (),
    loss: Any = None,
    global_batch: int | None = None,
    precision: str | None = None,
    progress: Watcher | None = None,
    **settings: Any,
) -> Plan:
    """Finds a parallel strategy.

    ``program`` is a static Program (the serial forward pass with its loss) or a Layer. A Layer, which may be built under
    ``LazyGuard``, is traced on ``input_spec``. With ``loss=None`` its forward must return the loss; otherwise the loss is
    ``loss(output, *labels)``, with the labels of ``labels_spec``. ``global_batch`` is the number of samples of one optimizer
    step, by default the batch of the program. ``precision`` is the training precision, ``fp32``, ``fp16`` or ``bf16``; by
    default that of the weights. All other arguments are fields of ``strategy.tuning``: level, cluster, cost_model,
    search_space, memory_reserve, save_path, load_path, blocked_plugins, time_limit, cache. ``progress`` is called with a
    ``search.Progress`` during the search.

    Raises TunerError for wrong input, ClusterError, UnsupportedProgram, and NoFeasiblePlan if nothing fits.
    """
    request = Request(Settings.from_mapping(settings), global_batch, precision, progress=progress)
    with collection_paused():
        if is_legacy(program):
            return tune_legacy(program, read_legacy_program(program, loss), request)
        return tune_graph(_graph(program, input_spec, labels_spec, loss, global_batch), request)


def _graph(program: Any, input_spec: Any, labels_spec: Sequence[Any], loss: Any, global_batch: int | None) -> Graph:
    if isinstance(program, nn.Layer):
        if not input_spec or not isinstance(input_spec, (list, tuple)):
            raise TunerError(
                "planning a Layer needs the shapes of its inputs: give input_spec=[paddle.static.InputSpec(...), ...]"
            )
        specs, labels, batch = with_batch(input_spec, labels_spec, global_batch)
        return trace_layer(program, specs, loss, labels, batch).graph
    if not hasattr(program, "global_block"):
        raise UnsupportedProgram(f"only a static Program or a paddle.nn.Layer can be planned, not {type(program).__name__}")
    return read_program(*with_static_shapes(program, loss))
