"""GPT in Paddle's public API: the decoder of GPT-2 and GPT-3 as Megatron-LM describes it (arXiv 1909.08053)."""

from __future__ import annotations

import paddle
from paddle import nn
from paddle.nn import functional as F

from paddle_rbt_plugin.models.config import GPTConfig


class GPTAttention(nn.Layer):
    """Multi-head self-attention with separate query, key and value projections."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads, self.head_dim, self.hidden = config.heads, config.head_dim, config.hidden
        self.q_proj = _linear(config, config.hidden, config.hidden)
        self.k_proj = _linear(config, config.hidden, config.hidden)
        self.v_proj = _linear(config, config.hidden, config.hidden)
        self.out_proj = _linear(config, config.hidden, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
        """``x`` is [batch, seq, hidden]; ``mask`` is added to the scores: [batch, 1, seq, seq]."""
        query, key, value = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        scores = paddle.scale(paddle.matmul(query, key, transpose_y=True), self.head_dim**-0.5)
        weights = self.dropout(F.softmax(scores + mask))
        context = paddle.transpose(paddle.matmul(weights, value), [0, 2, 1, 3])
        return self.out_proj(paddle.reshape(context, [0, 0, self.hidden]))

    def split(self, x: paddle.Tensor) -> paddle.Tensor:
        """[batch, seq, hidden] to [batch, heads, seq, head_dim]."""
        return paddle.transpose(paddle.reshape(x, [0, 0, self.heads, self.head_dim]), [0, 2, 1, 3])


class GPTFeedForward(nn.Layer):
    """Two projections with a GELU between them."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up_proj = _linear(config, config.hidden, config.ffn)
        self.down_proj = _linear(config, config.ffn, config.hidden)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.down_proj(F.gelu(self.up_proj(x), approximate=True))


class GPTBlock(nn.Layer):
    """One transformer layer: attention and feed-forward network, each normalised before and added to its input."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.hidden, config.norm_eps)
        self.attn = GPTAttention(config)
        self.ffn_norm = nn.LayerNorm(config.hidden, config.norm_eps)
        self.ffn = GPTFeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x), mask))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class GPTModel(nn.Layer):
    """Embeddings, blocks and the final norm."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab, config.hidden, weight_attr=_normal(config))
        self.position_embeddings = nn.Embedding(config.seq, config.hidden, weight_attr=_normal(config))
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.LayerList([GPTBlock(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.hidden, config.norm_eps)

    def forward(self, tokens: paddle.Tensor, position_ids: paddle.Tensor, attention_mask: paddle.Tensor) -> paddle.Tensor:
        """Hidden states [batch, seq, hidden] of ``tokens`` [batch, seq]."""
        x = self.dropout(self.word_embeddings(tokens) + self.position_embeddings(position_ids))
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.norm(x)


class GPTCriterion(nn.Layer):
    """Cross entropy of the next token, averaged over the tokens that ``loss_mask`` keeps."""

    def forward(self, logits: paddle.Tensor, labels: paddle.Tensor, loss_mask: paddle.Tensor) -> paddle.Tensor:
        """Of logits [batch, seq, vocab], labels and mask [batch, seq]; a scalar."""
        losses = F.cross_entropy(logits, paddle.unsqueeze(labels, 2), reduction="none")
        kept = paddle.reshape(loss_mask, [-1])
        return paddle.sum(paddle.reshape(losses, [-1]) * kept) / paddle.sum(kept)


class GPTForPretraining(nn.Layer):
    """The model with its head, tied to the word embeddings, and its loss."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gpt = GPTModel(config)
        self.criterion = GPTCriterion()

    def forward(
        self,
        tokens: paddle.Tensor,
        position_ids: paddle.Tensor,
        attention_mask: paddle.Tensor,
        labels: paddle.Tensor,
        loss_mask: paddle.Tensor,
    ) -> paddle.Tensor:
        """The loss, a scalar. All inputs are [batch, seq] but ``attention_mask``, which is [batch, 1, seq, seq] and holds
        0 where a token may look and a large negative number where it may not; ``labels`` are the next tokens."""
        x = self.gpt(tokens, position_ids, attention_mask)
        logits = paddle.matmul(x, self.gpt.word_embeddings.weight, transpose_y=True)
        return self.criterion(logits, labels, loss_mask)


def _linear(config: GPTConfig, width_in: int, width_out: int) -> nn.Linear:
    return nn.Linear(width_in, width_out, weight_attr=_normal(config))


def _normal(config: GPTConfig) -> paddle.ParamAttr:
    return paddle.ParamAttr(initializer=nn.initializer.Normal(0.0, config.init_std))
