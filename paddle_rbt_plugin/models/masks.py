"""Which keys a query may read, as numbers that are added to scores: 0 where it may, -1e9 where not."""

from __future__ import annotations

import paddle

_NEVER = -1e9


def block_of(seq: int, window: int) -> int:
    """Into how long blocks a sequence is cut for attention within a window; 0 where that saves nothing.

    Each block reads itself and the one before, 2 x block keys instead of ``seq``. A block covers the window, divides the
    sequence, and is as short as can be."""
    return next((b for b in range(window, seq // 2) if seq % b == 0 and 2 * b < seq), 0) if window else 0


def causal(seq: int, window: int, extra: int) -> tuple[paddle.Tensor, ...]:
    """For whole sequences: [seq, seq + extra], the keys up to the query's own, the last ``window`` of them if that is not 0.
    ``extra`` keys behind the others are read by all."""
    mask = paddle.triu(paddle.full([seq, seq], _NEVER, dtype="float32"), diagonal=1)
    if window:
        mask = mask + paddle.tril(paddle.full([seq, seq], _NEVER, dtype="float32"), diagonal=-window)
    return (_open(mask, extra),)


def banded(seq: int, window: int, extra: int) -> tuple[paddle.Tensor, ...]:
    """For blocks of ``block_of(seq, window)``, which read the block before and themselves: which keys the window holds,
    [block, 2 block + extra], and that the first block has none before it, [blocks, 1, 1, 2 block + extra]."""
    block = block_of(seq, window)
    query = paddle.unsqueeze(paddle.arange(block), 1)
    distance = query - (paddle.unsqueeze(paddle.arange(2 * block), 0) - block)
    held = paddle.cast((distance >= 0) & (distance < window), "float32")
    missing = paddle.concat([paddle.full([1, 1, 1, block], _NEVER), paddle.zeros([1, 1, 1, block])], axis=-1)
    first = paddle.concat([missing, paddle.zeros([seq // block - 1, 1, 1, 2 * block])], axis=0)
    return _open((1.0 - held) * _NEVER, extra), _open(first, extra)


def _open(mask: paddle.Tensor, extra: int) -> paddle.Tensor:
    if not extra:
        return mask
    return paddle.concat([mask, paddle.zeros([*mask.shape[:-1], extra])], axis=-1)
