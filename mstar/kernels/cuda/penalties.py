"""Penalties on what a row has seen, the floor under its length, and what its draws leave behind for the next ones.

The rules are those of `kernels/penalties.py`.  What a row looks back at lies in memory of its own, whose address comes
in a column; 0 is a row that looks at none, which costs a load.  Columns are [B].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.cuda.floor import bar_unless_alone
from mstar.kernels.cuda.pdl import launch_options, release_dependents, wait_for_inputs
from mstar.kernels.penalties import LEAST_FACTOR, MOST_FACTOR

_BLOCK = 4096  # logits per program
_LOOK = 1024  # logits looked at together for one that is left
_IDS = 16  # stop ids at a time
_ENTRIES = 64  # of a window, per program
_LANES = 128  # rows per program
_COUNT_BITS = 21  # a token stands in a window at most 2**20 times


@triton.jit
def _scaled(x, factor, MOST: tl.constexpr):
    """``x / factor`` where x is above 0, else ``x * factor``; finite values stay finite, others as they are."""
    result = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    result = tl.minimum(tl.maximum(result, -MOST), MOST)
    return tl.where(tl.abs(x) <= MOST, result, x)


@triton.jit
def _presence_kernel(x, vocab, seen_at, penalty, MOST: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    row = tl.program_id(1)
    seen = tl.load(seen_at + row)
    if seen != 0:
        cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        is_seen = tl.load(tl.multiple_of(seen.to(tl.pointer_type(tl.int8)), 16) + cols, mask=cols < vocab, other=0) != 0
        entry = x + row.to(tl.int64) * vocab + cols
        tl.store(entry, _scaled(tl.load(entry, mask=is_seen, other=0.0), tl.load(penalty + row), MOST), mask=is_seen)


def presence_penalty(x: torch.Tensor, seen_at: torch.Tensor, penalty: torch.Tensor) -> None:
    """Penalises in ``x`` fp32 [B, V], contiguous, every token that a row has seen by ``penalty`` fp32.

    ``seen_at`` int64: addresses of bool [V].
    """
    assert x.is_contiguous()
    assert x.dtype == torch.float32
    grid = (triton.cdiv(x.shape[1], _BLOCK), x.shape[0])
    options = launch_options(x, num_warps=4)
    _presence_kernel[grid](x, x.shape[1], seen_at, penalty, MOST=MOST_FACTOR, BLOCK=_BLOCK, **options)


@triton.jit
def _window_kernel(
    x,
    vocab,
    ring_at,
    window,
    penalty,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BITS: tl.constexpr,
    ENTRIES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    row = tl.program_id(1)
    ring = tl.load(ring_at + row)
    length = tl.load(window + row)
    first = tl.program_id(0) * ENTRIES
    if (ring != 0) & (first < length):
        tokens = ring.to(tl.pointer_type(tl.int32))
        place = first + tl.arange(0, ENTRIES)
        token = tl.load(tokens + place, mask=place < length, other=-1)
        count = tl.zeros((ENTRIES,), tl.int32)
        earlier = tl.zeros((ENTRIES,), tl.int32)
        for start in range(0, length, ENTRIES):
            other_place = start + tl.arange(0, ENTRIES)
            other = tl.load(tokens + other_place, mask=other_place < length, other=-2)
            is_same = token[:, None] == other[None, :]
            count += tl.sum(is_same.to(tl.int32), 1)
            earlier += tl.sum((is_same & (other_place[None, :] < place[:, None])).to(tl.int32), 1)
        factor = tl.full((ENTRIES,), 1.0, tl.float64)
        power = tl.full((ENTRIES,), 1.0, tl.float64) * tl.load(penalty + row).to(tl.float64)
        for bit in tl.static_range(BITS):
            factor = tl.where((count >> bit) & 1 != 0, factor * power, factor)
            power = power * power
        factor = tl.minimum(tl.maximum(factor, LEAST), MOST).to(tl.float32)
        is_first = (token >= 0) & (earlier == 0)  # one entry per distinct token
        entry = x + row.to(tl.int64) * vocab + token
        tl.store(entry, _scaled(tl.load(entry, mask=is_first, other=0.0), factor, MOST), mask=is_first)


def window_penalty(
    x: torch.Tensor, ring_at: torch.Tensor, window: torch.Tensor, penalty: torch.Tensor, max_window: int
) -> None:
    """Penalises in ``x`` fp32 [B, V], contiguous, a token by ``penalty ** n`` for the ``n`` times it stands in a row's
    window.

    ``ring_at`` int64: addresses of int32 [``window``], -1 for none; ``window`` int32, at most ``max_window``.
    """
    assert x.is_contiguous()
    assert x.dtype == torch.float32
    _window_kernel[(triton.cdiv(max_window, _ENTRIES), x.shape[0])](
        x,
        x.shape[1],
        ring_at,
        window,
        penalty,
        LEAST=LEAST_FACTOR,
        MOST=MOST_FACTOR,
        BITS=_COUNT_BITS,
        ENTRIES=_ENTRIES,
        **launch_options(x, num_warps=4),
    )


@triton.jit(do_not_specialize=["num_ids"])
def _floor_kernel(
    x, vocab, stop_ids, num_ids, offset, least, LOOK: tl.constexpr, IDS: tl.constexpr, USE_PDL: tl.constexpr
):
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    row = tl.program_id(0)
    if tl.load(offset + row) < tl.load(least + row):
        bar_unless_alone(x + row.to(tl.int64) * vocab, vocab, stop_ids, num_ids, LOOK, IDS)


def length_floor(x: torch.Tensor, stop_ids: torch.Tensor, offset: torch.Tensor, least: torch.Tensor) -> None:
    """Bars ``stop_ids`` int32 [S], distinct, in rows of ``x`` fp32 [B, V], contiguous, whose ``offset`` int64 is below
    ``least`` int64; a row that has nothing else left is spared."""
    assert x.is_contiguous()
    assert x.dtype == torch.float32
    _floor_kernel[(x.shape[0],)](
        x,
        x.shape[1],
        stop_ids,
        stop_ids.numel(),
        offset,
        least,
        LOOK=_LOOK,
        IDS=_IDS,
        **launch_options(x, num_warps=4),
    )


@triton.jit(do_not_specialize=["batch"])
def _record_kernel(tokens, batch, offset, seen_at, ring_at, window, before, LANES: tl.constexpr, USE_PDL: tl.constexpr):
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    is_row = row < batch
    token = tl.load(tokens + row, mask=is_row, other=0)
    seen = tl.load(seen_at + row, mask=is_row, other=0)
    entry = seen.to(tl.pointer_type(tl.int8)) + token
    tl.store(before + row, tl.load(entry, mask=seen != 0, other=0).to(tl.int32), mask=is_row)
    tl.store(entry, tl.full((LANES,), 1, tl.int8), mask=seen != 0)
    ring = tl.load(ring_at + row, mask=is_row, other=0)
    length = tl.maximum(tl.load(window + row, mask=is_row, other=1), 1)
    place = tl.load(offset + row, mask=is_row, other=0) % length
    entry = ring.to(tl.pointer_type(tl.int32)) + place
    tl.store(before + batch + row, tl.load(entry, mask=ring != 0, other=0), mask=is_row)
    tl.store(before + 2 * batch + row, place.to(tl.int32), mask=is_row)
    tl.store(entry, token.to(tl.int32), mask=ring != 0)


def record_draws(
    tokens: torch.Tensor, offset: torch.Tensor, seen_at: torch.Tensor, ring_at: torch.Tensor, window: torch.Tensor
) -> torch.Tensor:
    """Adds ``tokens`` int64, the draws number ``offset`` int64, to what rows have seen and to their rings.

    Returns:
        What that wrote over, int32 [3, B]: whether the token had been seen; what the ring held, and at which place.
    """
    before = torch.empty(3, tokens.numel(), dtype=torch.int32, device=tokens.device)
    _record_kernel[(triton.cdiv(tokens.numel(), _LANES),)](
        tokens,
        tokens.numel(),
        offset,
        seen_at,
        ring_at,
        window,
        before,
        LANES=_LANES,
        **launch_options(tokens, num_warps=4),
    )
    return before
