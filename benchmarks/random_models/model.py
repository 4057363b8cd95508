"""A case as a Layer, with its initial weights and its batches."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from paddle import nn
from paddle.static import InputSpec

from random_models import layers, movement, transformer
from random_models.blocks import INPUTS, Value
from random_models.grammar import Case, shapes
from random_models.losses import Criterion, label_arrays

LAYERS = {**layers.LAYERS, **transformer.LAYERS, **movement.LAYERS}


class Model(nn.Layer):
    """``forward(*inputs)`` returns the outputs, one alone not in a tuple."""

    def __init__(self, case: Case):
        super().__init__()
        values = shapes(case)
        self.statements = case["model"]
        self.outputs = [o["value"] for o in case["outputs"]]
        for i, s in enumerate(self.statements):
            if s["op"] in INPUTS or (s["op"] != "tied_head" and "of" in s):
                continue
            operands = [values[j].shape for j in s["in"]]
            more = [self.statements[s["in"][0]]["at"]["words"]] if s["op"] == "embedding" else []
            name, made = f"{s['op']}_{i}", LAYERS[s["op"]]
            if "times" in s:
                setattr(self, name, nn.LayerList([made(s["at"], *operands) for _ in range(s["times"])]))
            else:
                setattr(self, name, made(s["at"], *operands, *more))

    def _layer(self, i: int) -> Any:
        s = self.statements[i]
        i = s["of"] if "of" in s and s["op"] != "tied_head" else i
        return getattr(self, f"{s['op']}_{i}")

    def forward(self, *inputs: Any) -> Any:
        given = iter(inputs)
        values: list[Any] = []
        for i, s in enumerate(self.statements):
            operands = [values[j] for j in s["in"]]
            if s["op"] in INPUTS:
                values.append(next(given))
            elif "times" in s:
                x = operands[0]
                for layer in self._layer(i):
                    x = layer(x)
                values.append(x)
            elif s["op"] == "tied_head":
                values.append(self._layer(i)(*operands, self._layer(s["of"]).table))
            else:
                values.append(self._layer(i)(*operands))
        outputs = tuple(values[j] for j in self.outputs)
        return outputs[0] if len(outputs) == 1 else outputs


class WithLoss(nn.Layer):
    """``forward(*inputs, *labels)`` returns the loss."""

    def __init__(self, model: nn.Layer, criterion: Criterion, inputs: int):
        super().__init__()
        self.model, self.criterion, self.inputs = model, criterion, inputs

    def forward(self, *values: Any) -> Any:
        outputs = self.model(*values[: self.inputs])
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return self.criterion(*outputs, *values[self.inputs :])


def build(case: Case) -> tuple[nn.Layer, Criterion]:
    """The model with the weights of the case, and its loss."""
    model = Model(case)
    for name, parameter in model.named_parameters():
        values = _initial(parameter.numpy(), zlib.crc32(f"{case['seed']} {name}".encode()))
        parameter.set_value(values if "jitter" not in case else _jittered(values, case["jitter"]))
    return model, Criterion(case["outputs"])


def _initial(made: np.ndarray, seed: int) -> np.ndarray:
    """Weights that keep activations of the size of one, and no symmetry: scales near one, shifts near zero."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(made.shape)
    if np.ptp(made) == 0:  # a scale or a shift
        return (made + 0.1 * values).astype("float32")
    incoming = made.shape[0] if made.ndim == 2 else int(np.prod(made.shape[1:]))
    return (values / np.sqrt(min(max(incoming, 1), 64))).astype("float32")


def _jittered(values: np.ndarray, seed: int) -> np.ndarray:
    """Changed by some units in the last place."""
    return (values * (1 + 3e-7 * np.random.default_rng(seed).standard_normal(values.shape))).astype("float32")


def batch_arrays(case: Case, step: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Inputs and labels of the whole batch of a step."""
    random = np.random.default_rng([case["seed"], step])
    values, batch = shapes(case), case["sizes"]["batch"]
    inputs = [_input(s, v, batch, random) for s, v in zip(case["model"], values, strict=True) if s["op"] in INPUTS]
    labels = [a for o in case["outputs"] for a in label_arrays(o, values[o["value"]], batch, random)]
    return inputs, labels


def _input(statement: dict[str, Any], value: Value, batch: int, random: np.random.Generator) -> np.ndarray:
    shape = (batch, *value.shape)
    if statement["op"] == "tokens":
        return random.integers(0, statement["at"]["words"], shape).astype("int64")
    if statement["op"] == "attention_mask":
        causal = np.triu(np.ones(value.shape, bool), 1)
        return np.where(causal | (random.random(shape) < 0.1), -1e4, 0.0).astype("float32")
    return random.standard_normal(shape).astype("float32")


def specs(arrays: Sequence[np.ndarray], name: str, batch: int) -> list[InputSpec]:
    """Input specs for arrays, with a batch of another size."""
    return [InputSpec([batch, *a.shape[1:]], str(a.dtype), f"{name}{i}", stop_gradient=True) for i, a in enumerate(arrays)]
