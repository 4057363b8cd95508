"""All changes that this package makes to Paddle at run time; ``patching`` defines what a change is.

Importing the package installs those of ``INSTALLED_AT_IMPORT``. ``plan.shard_layer`` installs those of dygraph, the first plan
of a job on CPUs those of gloo, and the pass ``rule_based_tuner``, if applied alone, those that let Paddle's own passes continue
with its program. All others apply within scopes.
"""

from __future__ import annotations

from paddle_rbt_plugin.calibrate import measure
from paddle_rbt_plugin.cost import paddle as cost
from paddle_rbt_plugin.cost import paddle_memo
from paddle_rbt_plugin.handover.dygraph import ops, optimizer
from paddle_rbt_plugin.handover.dygraph import random as dygraph_random
from paddle_rbt_plugin.handover.engine import forward_loss, hooks, life
from paddle_rbt_plugin.handover.legacy import engine as legacy_engine
from paddle_rbt_plugin.handover.legacy import ops as legacy_ops
from paddle_rbt_plugin.handover.legacy import patches as legacy
from paddle_rbt_plugin.handover.legacy import random as legacy_random
from paddle_rbt_plugin.handover.pir import (
    clipping,
    engine_programs,
    gradient_merge,
    native,
    parameter_attributes,
    shared_weights,
    zero,
)
from paddle_rbt_plugin.handover.pir import patches as pir
from paddle_rbt_plugin.handover.shared import engine_random, gloo, gloo_paddle_2, random_streams
from paddle_rbt_plugin.patching import PaddleChange

INSTALLED_AT_IMPORT: tuple[PaddleChange, ...] = (
    hooks.tuning_has_fields,
    pir.distributed_strategies_have_tuning,
    hooks.engine_tunes_pir,
    legacy_engine.engine_tunes_legacy_programs,
    engine_programs.engine_keeps_programs,
    life.engine_lives_in_pir,
    forward_loss.engine_finds_forward_loss,
    forward_loss.dist_model_finds_forward_loss,
    engine_random.engine_starts_alike,
    parameter_attributes.groups_remembered,
    legacy.engine_starts_without_cuda,
)
CHANGES: tuple[PaddleChange, ...] = (
    *INSTALLED_AT_IMPORT,
    # Tracing, completing and partitioning PIR programs.
    pir.absent_operands_passed_over,
    native.native_tracing,
    native.traces_record_apart,
    native.errors_as_raised,
    native.values_are_viewed,
    native.flags_of_devices_are_off,
    native.values_as_balanced,
    native.engines_trace_natively,
    pir.averages_as_sums,
    pir.shards_become_partial,
    pir.recomputed_ops_draw_the_same,
    pir.recomputed_regions_read_what_is_kept,
    pir.gradients_whole,
    pir.partition_prepared,
    pir.gradients_accumulated_as_read,
    pir.chunks_as_marked,
    pir.receives_awaited,
    pir.programs_of_ranks_seen,
    pir.environment_read_anew,
    shared_weights.names_restored,
    shared_weights.copies_summed,
    zero.states_divided,
    gradient_merge.averaged_first,
    clipping.clipping_on_shards,
    engine_programs.outputs_marked,
    # Running programs of either IR.
    random_streams.ops_run_in_order,
    gloo.programs_communicate_through_gloo,
    gloo_paddle_2.paddle_2_communicates_through_gloo,
    # Legacy programs, and Paddle's CostEstimator, which reads them.
    legacy.cpu_needs_no_synchronization,
    legacy_ops.ops_in_legacy_programs,
    legacy_random.streams_named,
    cost.estimator_repaired,
    paddle_memo.estimates_remembered,
    # Dygraph.
    ops.ops_take_sharded_forms,
    dygraph_random.random_ops_draw_by_shard,
    dygraph_random.lazy_weights_seeded,
    optimizer.optimizers_adopted,
    measure.transposes_move_data,
)
