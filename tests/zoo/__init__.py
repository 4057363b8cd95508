"""Small models in Paddle's public API that the patterns must cover, each as its authors wire it.

``ZOO`` names them; every forward returns the loss. Sizes are such that 2 and 4 divide heads, key and value heads,
feed-forward size, experts and vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import paddle
from paddle.static import InputSpec

from . import bert, deepseek, gpt2, gptj, llama, lora, mixtral, t5, vit
from .parts import SEQ, VOCAB

BATCH = 4
TOKENS = ([BATCH, SEQ], "int64", VOCAB)


@dataclass(frozen=True)
class Model:
    """How to build a model and what it reads: shape, dtype and number of classes (0 for real numbers) by input name."""

    build: Callable[[], paddle.nn.Layer]
    inputs: dict[str, tuple[list[int], str, int]]

    @property
    def spec(self) -> list[InputSpec]:
        return [InputSpec(shape, dtype, name) for name, (shape, dtype, _) in self.inputs.items()]

    def sample(self, seed: int) -> list[np.ndarray]:
        """A batch of inputs, the same for the same seed."""
        random = np.random.default_rng(seed)
        return [
            random.integers(0, classes, shape).astype(dtype) if classes else random.standard_normal(shape).astype(dtype)
            for shape, dtype, classes in self.inputs.values()
        ]


def _text(*names: str) -> dict[str, tuple[list[int], str, int]]:
    return dict.fromkeys(names, TOKENS)


ZOO = {
    "GPT-2": Model(gpt2.GPT2, _text("tokens", "labels")),
    "GPT-J": Model(gptj.GPTJ, _text("tokens", "labels")),
    "BERT": Model(
        bert.BERT,
        {
            "tokens": TOKENS,
            "kinds": ([BATCH, SEQ], "int64", 2),
            "mask": ([BATCH, SEQ], "int64", 2),
            "labels": TOKENS,
            "follows": ([BATCH, 1], "int64", 2),
        },
    ),
    "T5": Model(t5.T5, _text("source", "target", "labels")),
    "T5 1.1": Model(lambda: t5.T5(gated=True), _text("source", "target", "labels")),
    "ViT": Model(
        vit.ViT,
        {"images": ([BATCH, 3, vit.IMAGE, vit.IMAGE], "float32", 0), "labels": ([BATCH, 1], "int64", vit.CLASSES)},
    ),
    "LLaMA-2": Model(llama.llama2, _text("tokens", "labels")),
    "LLaMA-3": Model(llama.llama3, _text("tokens", "labels")),
    "Multi-query": Model(llama.multi_query, _text("tokens", "labels")),
    "Qwen": Model(llama.qwen, _text("tokens", "labels")),
    "LoRA": Model(lora.lora, _text("tokens", "labels")),
    "DeepSeek": Model(deepseek.deepseek, _text("tokens", "labels")),
    "Mixtral": Model(mixtral.mixtral, _text("tokens", "labels")),
    "GShard": Model(mixtral.gshard, _text("tokens", "labels")),
}


@cache
def graph(name: str):
    """Graph of a model of the zoo, traced once."""
    from paddle_rbt_plugin.handover.pir.trace import trace_layer

    return trace_layer(ZOO[name].build(), ZOO[name].spec).graph
