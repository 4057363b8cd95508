"""Completed models for the tests of the cost model, made once per process."""

from __future__ import annotations

from functools import cache

from paddle_rbt_plugin.cluster import ProcessMesh
from paddle_rbt_plugin.completion import Completion
from paddle_rbt_plugin.cost import Candidate
from paddle_rbt_plugin.handover.pir.configs import config_graph
from paddle_rbt_plugin.models import Config, GPTConfig, LlamaConfig
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import Analysis, analyse

GPT = GPTConfig(layers=4, hidden=256, ffn=1024, heads=4, vocab=1024, seq=128)
DROPPING_GPT = GPTConfig(layers=4, hidden=1024, ffn=4096, heads=16, vocab=1024, seq=512, dropout=0.1)
LLAMA = LlamaConfig(layers=4, hidden=256, ffn=512, heads=4, kv_heads=4, vocab=1024, seq=128)


@cache
def analysis_of(config: Config, batch: int = 2) -> Analysis:
    return analyse(config_graph(config, batch), load_plugins().patterns)


@cache
def completed(config: Config = GPT, dp: int = 1, mp: int = 1) -> Completion:
    """The config on a stage of dp x mp ranks."""
    shape = {axis: n for axis, n in (("dp", dp), ("mp", mp)) if n > 1} or {"dp": 1}
    mesh = ProcessMesh(tuple(shape), tuple(shape.values()), tuple(range(dp * mp)))
    return analysis_of(config).complete(mesh)


def candidate(
    pp: int = 1, dp: int = 1, mp: int = 1, micro_batch: int = 2, accumulate_steps: int = 4, **more: object
) -> Candidate:
    return Candidate(pp, dp, mp, micro_batch, accumulate_steps, **more)  # type: ignore[arg-type]
