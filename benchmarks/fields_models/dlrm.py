"""DLRM (arXiv 1906.00091): 26 tables of categories, and a perceptron for 13 numbers, whose vectors interact by products."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import paddle
from paddle import nn


def perceptron(*widths: int) -> nn.Layer:
    pairs = pairwise(widths)
    layers = [layer for n, m in pairs for layer in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Layer):
    def __init__(self, tables: int = 26, rows: int = 1_000_000, width: int = 128):
        super().__init__()
        self.tables = nn.LayerList([nn.Embedding(rows, width) for _ in range(tables)])
        self.bottom = perceptron(13, 512, 256, width)
        self.top = perceptron(width + (tables + 1) ** 2, 1024, 1024, 512, 256, 1)

    def forward(self, numbers: Any, categories: Any) -> Any:
        dense = nn.functional.relu(self.bottom(numbers))
        vectors = paddle.stack([dense, *(table(categories[:, i]) for i, table in enumerate(self.tables))], axis=1)
        products = paddle.matmul(vectors, vectors, transpose_y=True).flatten(1)
        return self.top(paddle.concat([dense, products], axis=1))
