"""Log-probability and rank of each row's token, and its most likely tokens: rows that nobody asks about cost a load.

A row is cut into chunks.  The first kernel finds of each its peak, the mass under the softmax relative to that, how
many logits lie above the chosen one, and its largest logits as keys; the second puts the chunks together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.cuda.pdl import launch_options, release_dependents, wait_for_inputs
from mstar.kernels.logprobs import Told

_CHUNK = 8192  # logits
_NO_KEY = tl.constexpr(-(2**63))  # below the key of any logit


@triton.jit
def _keys(x, ids, vocab):
    """int64: as the floats are ordered, of equals the lowest id first."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 is no less than 0.0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (vocab - 1 - ids).to(tl.int64)


@triton.jit
def _chunk_kernel(
    logits,
    vocab,
    tokens,
    num_top,
    peaks,
    masses,
    above,
    keys,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    chunk, row = tl.program_id(0), tl.program_id(1)
    place = row * tl.num_programs(0) + chunk
    count = tl.minimum(tl.load(num_top + row).to(tl.int32), WIDTH)
    if count >= 0:
        logits += row.to(tl.int64) * vocab
        cols = chunk * CHUNK + tl.arange(0, CHUNK)
        is_token = cols < vocab
        x = tl.load(logits + cols, mask=is_token, other=float("-inf")).to(tl.float32)
        chosen = tl.load(logits + tl.load(tokens + row)).to(tl.float32)
        peak = tl.max(x, 0)
        peak = tl.where(tl.abs(peak) < float("inf"), peak, 0.0)
        tl.store(peaks + place, peak)
        tl.store(masses + place, tl.sum(tl.exp(x - peak), 0))
        tl.store(above + place, tl.sum((x > chosen).to(tl.int32), 0))
        left = tl.where(is_token, _keys(x, cols, vocab), _NO_KEY)
        for i in range(count):
            best = tl.max(left, 0)
            tl.store(keys + place * WIDTH + i, best)
            left = tl.where(left == best, _NO_KEY, left)


@triton.jit(do_not_specialize=["chunks"])
def _row_kernel(
    logits,
    vocab,
    chunks,
    tokens,
    num_top,
    peaks,
    masses,
    above,
    keys,
    logprob,
    rank,
    top_ids,
    top_logprobs,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    row = tl.program_id(0)
    count = tl.minimum(tl.minimum(tl.load(num_top + row), vocab).to(tl.int32), WIDTH)
    column = tl.arange(0, COLUMNS)
    if count < 0:
        tl.store(logprob + row, 0.0)
        tl.store(rank + row, 0)
        tl.store(top_ids + row * WIDTH + column, tl.full((COLUMNS,), -1, tl.int32), mask=column < WIDTH)
        tl.store(top_logprobs + row * WIDTH + column, tl.zeros((COLUMNS,), tl.float32), mask=column < WIDTH)
    else:
        chunk = tl.arange(0, CHUNKS)
        is_chunk = chunk < chunks
        place = row * chunks + chunk
        part = tl.load(masses + place, mask=is_chunk, other=0.0).to(tl.float64)
        own = tl.load(peaks + place, mask=is_chunk, other=float("-inf"))
        peak = tl.max(tl.where(part > 0, own, float("-inf")), 0)
        peak = tl.where(tl.abs(peak) < float("inf"), peak, 0.0).to(tl.float64)
        scale = tl.exp(tl.where(part > 0, own.to(tl.float64) - peak, 0.0))
        log_mass = tl.log(tl.sum(part * scale, 0))
        chosen = tl.load(logits + row.to(tl.int64) * vocab + tl.load(tokens + row)).to(tl.float32)
        told = (chosen.to(tl.float64) - peak - log_mass).to(tl.float32)
        tl.store(logprob + row, tl.where(chosen == float("-inf"), chosen, told))
        tl.store(rank + row, 1 + tl.sum(tl.load(above + place, mask=is_chunk, other=0), 0))
        at = place[:, None] * WIDTH + column[None, :]
        left = tl.load(keys + at, mask=is_chunk[:, None] & (column[None, :] < count), other=_NO_KEY)
        best = tl.full((COLUMNS,), 0, tl.int64)
        for i in range(count):
            largest = tl.max(tl.max(left, 1), 0)
            best = tl.where(column == i, largest, best)
            left = tl.where(left == largest, _NO_KEY, left)
        ids = (vocab - 1 - (best & 0xFFFFFFFF)).to(tl.int32)
        ordered = (best >> 32).to(tl.int32)
        x = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
        told_of = (x.to(tl.float64) - peak - log_mass).to(tl.float32)
        told_of = tl.where(x == float("-inf"), x, told_of)
        is_asked = column < count
        tl.store(top_ids + row * WIDTH + column, tl.where(is_asked, ids, -1), mask=column < WIDTH)
        tl.store(top_logprobs + row * WIDTH + column, tl.where(is_asked, told_of, 0.0), mask=column < WIDTH)


def tell(x: torch.Tensor, tokens: torch.Tensor, num_top: torch.Tensor, width: int) -> Told:
    """:func:`mstar.kernels.logprobs.tell`, of ``x`` [n, V] of any float dtype, contiguous; no ``num_top`` is above
    ``width``."""
    assert x.is_contiguous()
    (rows, vocab), device = x.shape, x.device
    chunks = triton.cdiv(vocab, _CHUNK)
    peaks, masses = (torch.empty(rows, chunks, dtype=torch.float32, device=device) for _ in range(2))
    above = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    keys = torch.empty(rows, chunks, width, dtype=torch.int64, device=device)
    told = Told(
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, width, dtype=torch.int32, device=device),
        torch.empty(rows, width, dtype=torch.float32, device=device),
    )
    parts = tokens, num_top, peaks, masses, above, keys
    _chunk_kernel[(chunks, rows)](x, vocab, *parts, CHUNK=_CHUNK, WIDTH=width, **launch_options(x, num_warps=8))
    _row_kernel[(rows,)](
        x,
        vocab,
        chunks,
        *parts,
        *told,
        CHUNKS=triton.next_power_of_2(chunks),
        WIDTH=width,
        COLUMNS=max(triton.next_power_of_2(width), 2),
        **launch_options(x, num_warps=4),
    )
    return told
