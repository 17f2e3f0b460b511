"""Tokens barred by masks of a bit each: those of the rows that have one, and nothing of the others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.cuda.pdl import launch_options, release_dependents, wait_for_inputs

_WORDS = 64  # of a mask, per program


@triton.jit
def _bar_kernel(x, vocab, words, words_per_row, mask_of, WORDS: tl.constexpr, USE_PDL: tl.constexpr):
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    row = tl.program_id(1)
    mask = tl.load(mask_of + row)
    if mask >= 0:
        word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
        bit = tl.arange(0, 32)
        own = tl.load(words + mask.to(tl.int64) * words_per_row + word, mask=word < words_per_row, other=-1)
        is_barred = ((own[:, None] >> bit[None, :]) & 1) == 0
        cols = word[:, None] * 32 + bit[None, :]
        tl.store(x + row.to(tl.int64) * vocab + cols, float("-inf"), mask=is_barred & (cols < vocab))


def bar_rows(x: torch.Tensor, words: torch.Tensor, mask_of: torch.Tensor) -> None:
    """:func:`mstar.engine.resources.grammar.masks.bar_rows` in one kernel.

    Args:
        x: logits [B, V], contiguous, changed in place.
        words: int32 [masks, words], at least ``V / 32`` a mask; a bit of 0 bars.
        mask_of: int32 [B], each row's mask, -1 for none.
    """
    assert x.is_contiguous()
    assert words.is_contiguous()
    batch, vocab = x.shape
    grid = (triton.cdiv(vocab, 32 * _WORDS), batch)
    _bar_kernel[grid](x, vocab, words, words.shape[1], mask_of, WORDS=_WORDS, **launch_options(x, num_warps=4))
