"""Layers of Paddle's own transformers: norms before or behind, encoder alone or with a decoder, dropout included."""

import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F
from paddle.static import InputSpec

from paddle_rbt_plugin.handover.pir.trace import trace_layer
from paddle_rbt_plugin.layers import cluster_layers

NORMS = pytest.mark.parametrize("before", [True, False], ids=["norms before", "norms behind"])


class Encoder(nn.Layer):
    """BERT's encoder with a classifier of the first token."""

    def __init__(self, layers, before):
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.norm = nn.LayerNorm(32)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, normalize_before=before), layers)
        self.head = nn.Linear(32, 2)

    def forward(self, tokens, label):
        x = self.encoder(self.norm(self.embedding(tokens)))
        return F.cross_entropy(self.head(x[:, 0]), label)


class Translator(nn.Layer):
    """An encoder, a decoder that attends to it, and a tied embedding."""

    def __init__(self, encoders, decoders, before):
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.transformer = nn.Transformer(32, 4, encoders, decoders, 64, normalize_before=before)

    def forward(self, source, target, labels):
        x = self.transformer(self.embedding(source), self.embedding(target))
        logits = paddle.matmul(x, self.embedding.weight, transpose_y=True)
        return F.cross_entropy(logits, paddle.unsqueeze(labels, 2))


def tokens(name):
    return InputSpec([2, 8], "int64", name)


def block_scopes(graph, layer_class):
    """Numbers in struct_name of the Layers of that class, per block that holds any, in order."""
    names = [{part for i in s.ops for part in graph.ops[i].scope.split("/")} for s in cluster_layers(graph).blocks]
    found = [[part for part in block if part.rsplit("_", 1)[0] == layer_class or part == layer_class] for block in names]
    return [sorted(block) for block in found if block]


@NORMS
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_every_encoder_layer_is_a_layer(n, before):
    graph = trace_layer(Encoder(n, before), [tokens("tokens"), InputSpec([2], "int64", "label")]).graph
    numbers = [f"_{i}" if i else "" for i in range(n)]
    assert block_scopes(graph, "TransformerEncoderLayer") == [[f"TransformerEncoderLayer{i}"] for i in numbers]


@NORMS
@pytest.mark.parametrize(("encoders", "decoders"), [(2, 2), (3, 3), (4, 2), (1, 3)])
def test_every_encoder_layer_and_every_decoder_layer_is_a_layer(encoders, decoders, before):
    model = Translator(encoders, decoders, before)
    graph = trace_layer(model, [tokens("source"), tokens("target"), tokens("labels")]).graph
    assert cluster_layers(graph).count == encoders + decoders
    assert len(block_scopes(graph, "TransformerEncoderLayer")) == encoders
    assert len(block_scopes(graph, "TransformerDecoderLayer")) == decoders
