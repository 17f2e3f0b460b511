"""Edits of logits for the rows that have any, and what a drawn token leaves behind for the next ones.

What a row needs lies in memory of its own, whose address comes in a column; 0 is a row that needs none, which costs a
load.  Columns are [B].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.cuda.floor import bar_unless_alone
from mstar.kernels.cuda.pdl import launch_options, release_dependents, wait_for_inputs

_BLOCK = 2048  # logits per program
_LOOK = 1024  # logits looked at together for one that is left
_IDS = 64  # stop ids, and bad words, at a time
_LANES = 128  # rows per program


@triton.jit
def _edit_kernel(
    logits, edited, vocab, bias_at, counts_at, presence, frequency, BLOCK: tl.constexpr, USE_PDL: tl.constexpr
):
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    row = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = cols < vocab
    start = row.to(tl.int64) * vocab
    x = tl.load(logits + start + cols, mask=is_token, other=0.0).to(tl.float32)
    bias = tl.load(bias_at + row)
    if bias != 0:
        added = tl.load(tl.multiple_of(bias.to(tl.pointer_type(tl.float32)), 16) + cols, mask=is_token, other=0.0)
        x = tl.where(added == float("-inf"), added, tl.where(added == 0, x, x + added))
    counts = tl.load(counts_at + row)
    if counts != 0:
        count = tl.load(tl.multiple_of(counts.to(tl.pointer_type(tl.int32)), 16) + cols, mask=is_token, other=0)
        penalty = tl.load(presence + row) + tl.load(frequency + row) * count.to(tl.float32)
        x = tl.where(count > 0, x - penalty, x)
    tl.store(edited + start + cols, x, mask=is_token)


def edit_logits(
    logits: torch.Tensor,
    bias_at: torch.Tensor,
    counts_at: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """``logits`` [B, V] of any float dtype, contiguous, with every row's edits; fp32 [B, V] in memory of its own.

    Args:
        bias_at: int64, addresses of fp32 [V]: what is added to each logit, -inf where a token is barred.
        counts_at: int64, addresses of int32 [V]: how often each token was generated.
        presence, frequency: fp32; ``presence + frequency * count`` is taken off a token that was generated.
    """
    assert logits.is_contiguous()
    batch, vocab = logits.shape
    edited = torch.empty(batch, vocab, dtype=torch.float32, device=logits.device)
    _edit_kernel[(triton.cdiv(vocab, _BLOCK), batch)](
        logits,
        edited,
        vocab,
        bias_at,
        counts_at,
        presence,
        frequency,
        BLOCK=_BLOCK,
        **launch_options(logits, num_warps=4, enable_fp_fusion=False),  # roundings are those of the host
    )
    return edited


@triton.jit
def _hold_back_kernel(
    x,
    vocab,
    words_at,
    num_words,
    recent_at,
    recent_length,
    stops_at,
    num_stops,
    LOOK: tl.constexpr,
    IDS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    row = tl.program_id(0)
    x += row.to(tl.int64) * vocab
    count = tl.load(num_words + row)
    if count > 0:
        words = tl.load(words_at + row).to(tl.pointer_type(tl.int32))
        recent = tl.load(recent_at + row).to(tl.pointer_type(tl.int32))
        length = tl.load(recent_length + row)
        pushed = tl.load(recent)
        for first in range(0, count, IDS):
            word = first + tl.arange(0, IDS)
            is_word = word < count
            last = tl.load(words + word, mask=is_word, other=0)
            before = tl.load(words + count + word, mask=is_word, other=0)
            begin = 3 * count + tl.load(words + 2 * count + word, mask=is_word, other=0)
            is_completed = is_word
            for back in range(length):
                newest = tl.load(recent + 1 + (pushed + length - 1 - back) % length)
                wanted = tl.load(words + begin + back, mask=is_word & (back < before), other=-1)
                is_completed = is_completed & ((back >= before) | (wanted == newest))
            tl.store(x + last, float("-inf"), mask=is_completed)
        tl.debug_barrier()  # what was barred here is looked at below
    stops = tl.load(num_stops + row)
    if stops > 0:
        bar_unless_alone(x, vocab, tl.load(stops_at + row).to(tl.pointer_type(tl.int32)), stops, LOOK, IDS)


def hold_back(
    x: torch.Tensor,
    words_at: torch.Tensor,
    num_words: torch.Tensor,
    recent_at: torch.Tensor,
    recent_length: torch.Tensor,
    stops_at: torch.Tensor,
    num_stops: torch.Tensor,
) -> None:
    """Bars in ``x`` fp32 [B, V], contiguous, the last id of each bad word that it would complete; then the row's stop
    ids, unless nothing else is left.

    Args:
        words_at: int64, addresses of int32: of each of ``num_words`` int32 words the last id, then of each how many
            ids stand before it, then where these begin, behind which they follow, the last one first.
        recent_at: int64, addresses of int32 [1 + ``recent_length``], ``recent_length`` int32: see :func:`record`; at
            least as many tokens as stand before the last of any word.
        stops_at: int64, addresses of ``num_stops`` int32 distinct ids, int32.
    """
    assert x.is_contiguous()
    assert x.dtype == torch.float32
    _hold_back_kernel[(x.shape[0],)](
        x,
        x.shape[1],
        words_at,
        num_words,
        recent_at,
        recent_length,
        stops_at,
        num_stops,
        LOOK=_LOOK,
        IDS=_IDS,
        **launch_options(x, num_warps=4),
    )


@triton.jit(do_not_specialize=["batch"])
def _record_kernel(
    tokens, batch, is_kept, counts_at, recent_at, recent_length, LANES: tl.constexpr, USE_PDL: tl.constexpr
):
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    is_row = row < batch
    moves = is_row & (tl.load(is_kept + row, mask=is_row, other=0) != 0)
    token = tl.load(tokens + row, mask=moves, other=0)
    counts = tl.load(counts_at + row, mask=moves, other=0)
    entry = counts.to(tl.pointer_type(tl.int32)) + token
    tl.store(entry, tl.load(entry, mask=counts != 0, other=0) + 1, mask=counts != 0)
    recent = tl.load(recent_at + row, mask=moves, other=0)
    ring = recent.to(tl.pointer_type(tl.int32))
    length = tl.load(recent_length + row, mask=recent != 0, other=1)
    pushed = tl.load(ring, mask=recent != 0, other=0)
    tl.store(ring + 1 + pushed, token.to(tl.int32), mask=recent != 0)
    tl.store(ring, (pushed + 1) % length, mask=recent != 0)


def record(
    tokens: torch.Tensor,
    is_kept: torch.Tensor,
    counts_at: torch.Tensor,
    recent_at: torch.Tensor,
    recent_length: torch.Tensor,
) -> None:
    """Takes ``tokens`` int64 as the newest of the rows of which ``is_kept`` int32 is not 0.

    Args:
        counts_at: as in :func:`edit_logits`, counted up.
        recent_at: int64, addresses of int32 [1 + ``recent_length``]: the newest tokens in a ring, -1 where there are
            none yet, behind the place in it that the next one takes.
    """
    _record_kernel[(triton.cdiv(tokens.numel(), _LANES),)](
        tokens,
        tokens.numel(),
        is_kept,
        counts_at,
        recent_at,
        recent_length,
        LANES=_LANES,
        **launch_options(tokens, num_warps=4),
    )
