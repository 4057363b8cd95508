"""Predicts the runs of a table: the graph of each model, its patterns, completion, and cost, as for any plan.

What a row does not say is taken as such runs are usually made. Megatron-LM and PaddleNLP both keep a sharded vocabulary
sharded, pad it to a multiple of 128 tp, fuse elementwise ops, reduce the gradient of an input beside the product for its
weight's gradient, hold a copy of a tied weight on each stage that reads it, and accumulate gradients in float32 under bf16 but
not under fp16. GPT runs drop out with probability 0.1 and spell attention out; LLaMA runs do neither: their attention is one
fused kernel. Context parallelism splits each sequence: a rank holds 1 / cp of a sample, gradients are reduced over dp x cp, and
the exchange of keys and values hides behind attention (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paddle_rbt_plugin.cluster import Cluster, stage_meshes
from paddle_rbt_plugin.cluster.mesh import smallest_factor
from paddle_rbt_plugin.cost import DEFAULT, Candidate, Constants, Estimate, Training, estimate
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.handover.pir.configs import config_graph
from paddle_rbt_plugin.models import Config, GPTConfig, LlamaConfig
from paddle_rbt_plugin.plugins import load_plugins, parse_cluster
from paddle_rbt_plugin.runs.table import TrainingRun, read_runs
from paddle_rbt_plugin.search import Analysis, analyse

GPT_DROPOUT = 0.1
"""Megatron-LM's default for attention and hidden states."""
VOCABULARY_MULTIPLE = 128
"""A vocabulary is padded to a multiple of this times tp (Megatron-LM, ``--make-vocab-size-divisible-by``)."""


def estimate_runs(
    path: str | Path, progress: Callable[[int, int], None] | None = None, memory_reserve: float = 0.1
) -> list[dict[str, Any]]:
    """Predicts each run of a CSV file, in its order.

    A result holds ``id``, ``step_time_s``, ``peak_memory_bytes``, ``fits``, ``tflops_per_gpu``, and the breakdowns ``time`` in
    seconds and ``memory`` in bytes. ``progress`` is told after each run how many of how many are done. Raises TunerError that
    names the file and the row."""
    runs = read_runs(path)
    predictor = Predictor(memory_reserve)
    results = []
    for done, run in enumerate(runs, start=1):
        try:
            results.append(_result(run, predictor.predict(run)))
        except TunerError as error:
            raise type(error)(f"{path}, run {run.id}: {error}") from error
        if progress:
            progress(done, len(runs))
    return results


class Predictor:
    """Predicts runs, and keeps what runs of the same model share: its analysis, and its completion for each tp."""

    def __init__(self, memory_reserve: float = 0.1, constants: Constants = DEFAULT):
        self.memory_reserve = memory_reserve
        self.constants = constants
        self._patterns = load_plugins().patterns
        self._analyses: dict[tuple[Config, int], Analysis] = {}

    def predict(self, run: TrainingRun) -> Estimate:
        """The estimate of a run. Raises TunerError where the model cannot be sharded so."""
        cluster = run_cluster(run)
        mesh = stage_meshes(cluster, run.pp, run.dp * run.cp, run.tp)[0]
        analysis = self._analysis(run_config(run), run.dp * run.cp)
        reason = analysis.indivisible({"mp": run.tp})
        if reason:
            raise TunerError(str(reason))
        completion = analysis.complete(mesh)
        return estimate(
            completion,
            run_candidate(run),
            cluster,
            run_training(run),
            memory_reserve=self.memory_reserve,
            constants=self.constants,
        )

    def _analysis(self, config: Config, dp: int) -> Analysis:
        # Completion wants a batch that the data-parallel degree divides, and cares for nothing else about it.
        batch = max(2, smallest_factor(dp))
        if (config, batch) not in self._analyses:
            self._analyses[config, batch] = analyse(config_graph(config, batch), self._patterns)
        return self._analyses[config, batch]


def run_cluster(run: TrainingRun) -> Cluster:
    """The machines of a run. Raises ClusterError for an unknown device."""
    per_machine = min(run.gpus, run.gpus_per_node)
    cluster = parse_cluster(f"{run.gpus // per_machine}x{per_machine}:{run.gpu}")
    return cluster if run.inter_node_GBps is None else cluster.with_network(run.inter_node_GBps * 1e9)


def run_config(run: TrainingRun) -> Config:
    """The model of a run."""
    multiple = VOCABULARY_MULTIPLE * run.tp
    shape: dict[str, Any] = {name: getattr(run, name) for name in ("layers", "hidden", "ffn", "heads", "seq")}
    shape["vocab"] = -(-run.vocab // multiple) * multiple
    if run.arch == "llama":
        return LlamaConfig(**shape, kv_heads=run.kv_heads)
    return GPTConfig(**shape, dropout=GPT_DROPOUT)


def run_candidate(run: TrainingRun) -> Candidate:
    """The strategy of a run."""
    return Candidate(
        pp=run.pp,
        dp=run.dp * run.cp,
        mp=run.tp,
        micro_batch=run.mbs if run.cp == 1 else run.mbs / run.cp,  # type: ignore[arg-type]  # part of a sample
        accumulate_steps=run.micro_batches,
        recompute=run.recompute,  # type: ignore[arg-type]
        sharding_stage=int(run.sharding.removeprefix("stage")) if run.sharding != "none" else 0,
        sequence_parallel=run.seq_parallel,
        schedule="VPP" if run.vpp > 1 else "1F1B",
        vpp=run.vpp,
    )


def run_training(run: TrainingRun) -> Training:
    """How such a run is usually trained."""
    return Training(
        global_batch=run.gbs,
        precision=run.precision,  # type: ignore[arg-type]
        fused_attention=run.arch == "llama",
        fused_elementwise=True,
        overlap_mp=True,
        whole_regions=True,
        own_copies=True,
        float32_gradients=run.precision == "bf16",
    )


def _result(run: TrainingRun, estimate: Estimate) -> dict[str, Any]:
    return {
        "id": run.id,
        "step_time_s": estimate.step_time_s,
        "peak_memory_bytes": round(estimate.peak_memory_bytes),
        "fits": estimate.fits,
        "tflops_per_gpu": estimate.tflops_per_gpu,
        "time": dict(estimate.time),
        "memory": {k: round(v) for k, v in estimate.memory.items()},
    }
