"""What goes through memory when kernels are fused, and where the core of attention is."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
from cost_cases import DROPPING_GPT, GPT, LLAMA, completed

from paddle_rbt_plugin.completion import SegmentWork
from paddle_rbt_plugin.cost.attention import backward_cores, forward_cores
from paddle_rbt_plugin.cost.fusion import Traffic, pass_traffic
from paddle_rbt_plugin.models import Config


def block(config: Config) -> SegmentWork:
    completion = completed(config)
    return next(w for w, s in zip(completion.work, completion.layers.segments, strict=True) if s.is_block)


def traffic(work: SegmentWork, fused: bool, backward: bool = False) -> dict[str, Traffic]:
    kernels = work.backward if backward else work.forward
    found = pass_traffic(kernels, {v.name for v in work.saved}, fused)
    return {f"{k.type}_{i}": t for i, (k, t) in enumerate(zip(kernels, found, strict=True))}


def elements(found: dict[str, Traffic]) -> int:
    return sum(prod(v.shape) for t in found.values() for v in (*t.reads, *t.writes))


def test_without_fusion_every_forward_op_reads_its_operands_and_writes_its_results() -> None:
    work = block(GPT)
    for kernel, found in zip(work.forward, traffic(work, fused=False).values(), strict=True):
        assert (found.reads, found.writes) == (kernel.inputs, kernel.outputs)


@pytest.mark.parametrize("config", [GPT, DROPPING_GPT, LLAMA], ids=["gpt", "dropout", "llama"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_fusion_moves_less_in_fewer_kernels(config: Config, backward: bool) -> None:
    work = block(config)
    alone, together = traffic(work, False, backward), traffic(work, True, backward)
    assert elements(together) < elements(alone)
    assert sum(t.launched for t in together.values()) < sum(t.launched for t in alone.values())


def test_bias_and_transpose_belong_to_the_product_before_them() -> None:
    found = traffic(block(GPT), fused=True)
    adds = [t for name, t in found.items() if name.startswith("add_")]
    assert not adds[0].launched
    assert not adds[0].writes
    transposes = [t for name, t in found.items() if name.startswith("transpose_")]
    assert not transposes[0].launched
    assert transposes[0].writes


def test_scores_are_written_once_before_and_once_by_the_softmax() -> None:
    work = block(GPT)
    square = (2, GPT.heads, GPT.seq, GPT.seq)
    written = [v for t in traffic(work, fused=True).values() for v in t.writes if v.shape == square]
    read = [v for t in traffic(work, fused=True).values() for v in t.reads if v.shape == square]
    assert len(written) == len(read) == 2


def test_a_value_that_backward_needs_is_written() -> None:
    work = block(GPT)
    gelu = next(k for k in work.forward if k.type == "gelu")
    written = {v.name for t in traffic(work, fused=True).values() for v in t.writes}
    assert gelu.inputs[0].name in written


def test_a_gradient_op_does_not_read_what_is_not_kept_for_it() -> None:
    work = block(GPT)
    saved = {v.name for v in work.saved}
    for found in traffic(work, fused=False, backward=True).values():
        assert all(v.kind == "param" or v.name.endswith("@GRAD") or v.name in saved for v in found.reads)


@pytest.mark.parametrize("config", [GPT, DROPPING_GPT, LLAMA], ids=["gpt", "dropout", "llama"])
@pytest.mark.parametrize("find", [forward_cores, backward_cores])
def test_each_block_has_one_attention_core(config: Config, find: Callable[..., tuple]) -> None:
    (core,) = find(block(config))
    square = (2, config.heads, config.seq, config.seq)
    assert core.scores.shape == square
    assert core.query.shape == core.key.shape == (2, config.heads, config.seq, config.head_dim)


@pytest.mark.parametrize("config", [GPT, DROPPING_GPT], ids=["plain", "dropout"])
def test_the_core_keeps_its_probabilities_and_masks(config: Config) -> None:
    work = block(config)
    (core,) = backward_cores(work)
    inner = [v for v in work.saved if v.name in core.inner]
    assert {v.shape for v in inner} == {(2, config.heads, config.seq, config.seq)}
    assert len(inner) == (3 if config.dropout else 1)


def test_head_and_embedding_have_no_attention() -> None:
    completion = completed(GPT)
    for work, segment in zip(completion.work, completion.layers.segments, strict=True):
        if not segment.is_block:
            assert not forward_cores(work)
            assert not backward_cores(work)
