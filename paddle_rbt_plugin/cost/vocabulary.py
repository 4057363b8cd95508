"""Embedding and loss as they run with Paddle's passes for a sharded vocabulary.

Left alone, Paddle gathers a vocabulary-sharded embedding before the look-up and the logits before the loss, and reduces the
embedding's gradient in every micro batch. The passes ``replace_with_c_embedding`` and ``replace_with_parallel_cross_entropy``
keep both sharded, as Megatron-LM does (arXiv 1909.08053, section 3): the look-up is followed by an all-reduce of the hidden
state, the loss by all-reduces of its maximum, its sum and the target's logit, three numbers per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paddle_rbt_plugin.completion.placement import Placement
from paddle_rbt_plugin.completion.work import Collective, Kernel, SegmentWork, Value
from paddle_rbt_plugin.cost.sizes import EMBEDDINGS, LOSS_OPS, base_name

LOSS_REDUCTIONS = 3


def with_sharded_vocabulary(work: SegmentWork) -> SegmentWork:
    """The same work with a sharded vocabulary kept sharded; the work itself where it gathers none."""
    sharded = _gathered_vocabulary(work)
    if not sharded:
        return work

    def keep(value: Value) -> Value:
        placement = sharded.get(base_name(value.name))
        return replace(value, placement=placement) if placement else value

    def rewrite(kernel: Kernel) -> Kernel:
        collectives = [c for c in kernel.collectives if base_name(c.value.name) not in sharded]
        if kernel.phase == "forward":
            collectives += _reductions(kernel, sharded)
        return replace(
            kernel,
            inputs=tuple(map(keep, kernel.inputs)),
            outputs=tuple(map(keep, kernel.outputs)),
            collectives=tuple(collectives),
        )

    return replace(
        work,
        forward=tuple(map(rewrite, work.forward)),
        backward=tuple(map(rewrite, work.backward)),
        saved=tuple(map(keep, work.saved)),
        gradient_syncs=(*work.gradient_syncs, *_late_syncs(work, sharded)),
    )


def _gathered_vocabulary(work: SegmentWork) -> dict[str, Placement]:
    """Where the values that are gathered for an embedding or a loss lie before that, with the loss's own softmax."""
    made = {v.name: v for v in (*work.params, *(v for k in work.forward for v in k.outputs))}
    found: dict[str, Placement] = {}
    for kernel in work.forward:
        for c in kernel.collectives:
            source = made.get(c.value.name)
            if c.kind != "all_gather" or source is None or kernel.type not in EMBEDDINGS | LOSS_OPS:
                continue
            found[source.name] = source.placement
            if kernel.type in LOSS_OPS:
                found |= {v.name: source.placement for v in kernel.outputs if v.shape == source.shape}
    return found


def _reductions(kernel: Kernel, sharded: Mapping[str, Placement]) -> list[Collective]:
    gathered = [c for c in kernel.collectives if c.kind == "all_gather" and c.value.name in sharded]
    if not gathered:
        return []
    axis = gathered[0].axis
    if kernel.type in EMBEDDINGS:
        return [Collective("all_reduce", axis, kernel.outputs[0], "forward")]
    return [Collective("all_reduce", axis, v, "forward") for v in kernel.outputs if v.name not in sharded] * LOSS_REDUCTIONS


def _late_syncs(work: SegmentWork, sharded: Mapping[str, Placement]) -> list[Collective]:
    """The reduction of a sharded parameter's gradient, once per step in place of once per micro batch."""
    early = {
        (c.axis, base_name(c.value.name)): c.value
        for k in work.backward
        for c in k.collectives
        if c.kind == "all_reduce" and base_name(c.value.name) in sharded
    }
    params = {v.name for v in work.params}
    return [
        Collective("all_reduce", axis, replace(value, placement=sharded[name]), "optimizer")
        for (axis, name), value in early.items()
        if name in params
    ]
