"""Ids that a row may not draw yet, barred unless nothing else is left to draw."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bar_unless_alone(x, vocab, ids, num_ids, BLOCK: tl.constexpr, IDS: tl.constexpr):
    """Sets the ``num_ids`` distinct ``ids`` of the row ``x`` fp32 [vocab] to -inf, if another token is above that.

    The row is looked through only until more tokens than these ids are found above -inf: nearly always its first block.
    """
    own = tl.arange(0, IDS)
    num_open = tl.full((), 0, tl.int32)
    for start in range(0, num_ids, IDS):
        is_id = start + own < num_ids
        token = tl.load(ids + start + own, mask=is_id, other=0)
        num_open += tl.sum((tl.load(x + token, mask=is_id, other=float("-inf")) > float("-inf")).to(tl.int32))
    found = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    while (found <= num_open) & (start < vocab):
        cols = start + tl.arange(0, BLOCK)
        part = tl.load(x + cols, mask=cols < vocab, other=float("-inf"))
        found += tl.sum((part > float("-inf")).to(tl.int32))
        start += BLOCK
    if found > num_open:
        for start in range(0, num_ids, IDS):
            is_id = start + own < num_ids
            token = tl.load(ids + start + own, mask=is_id, other=0)
            tl.store(x + token, float("-inf"), mask=is_id)
