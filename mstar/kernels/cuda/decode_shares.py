"""What programs of decode attention that share a row leave for the last of them, and how it adds that up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mstar.kernels.cuda.decode_split import MAX_SHARES, PROGRAMS, ROW_SHARES
from mstar.kernels.cuda.paged_blocks import LOWEST

MAX_MEMBERS = 16  # query heads of a program: the rows of a matrix instruction
MERGED_ELEMENTS = 4096  # float32, of shares that are added up at once


class DecodeScratch:
    """What programs that share a row leave for the last of them.

    One serves all calls of a device that run one after another, of up to ``max_rows`` rows and of these heads.  Its
    counts are zero between calls.
    """

    def __init__(self, max_rows: int, num_heads: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
        members, blocks = members_of(num_heads // kv_heads)
        pairs = max_rows * kv_heads * blocks
        num_programs = max(PROGRAMS, ROW_SHARES * pairs)
        self.sums = torch.empty(num_programs, members, head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(num_programs, 2, members, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(pairs, dtype=torch.int32, device=device)
        self.row_starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)


def members_of(group: int) -> tuple[int, int]:
    """Query heads of one program, and programs that serve the heads of one kv head."""
    return min(group, MAX_MEMBERS), triton.cdiv(group, MAX_MEMBERS)


def merged_at_once(block_members: int, block_d: int) -> int:
    """Shares that :func:`merge_shares` adds up in one step, of such blocks: a power of 2."""
    return min(MAX_SHARES, MERGED_ELEMENTS // (block_members * block_d)) or 1


@triton.jit
def merge_shares(
    sums,
    stats,
    first,
    shares,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """float32 [BLOCK_MEMBERS, BLOCK_D]: attention over the tokens of ``shares`` shares from ``first`` on."""
    member, dim = tl.arange(0, BLOCK_MEMBERS), tl.arange(0, BLOCK_D)
    highest = tl.full([BLOCK_MEMBERS], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_MEMBERS], tl.float32)
    acc = tl.zeros([BLOCK_MEMBERS, BLOCK_D], tl.float32)
    for start in tl.range(0, shares, MERGED, num_stages=1):
        index = start + tl.arange(0, MERGED)
        is_stat = (index < shares)[:, None] & (member < MEMBERS)[None, :]
        at = (first + index)[:, None] * (2 * MEMBERS) + member[None, :]
        # From the L2 cache, where other programs left them.
        highs = tl.load(stats + at, mask=is_stat, other=LOWEST, cache_modifier=".cg")
        totals = tl.load(stats + at + MEMBERS, mask=is_stat, other=0.0, cache_modifier=".cg")
        at = ((first + index)[:, None, None] * MEMBERS + member[None, :, None]) * HEAD_DIM + dim[None, None, :]
        is_sum = is_stat[:, :, None] & (dim < HEAD_DIM)[None, None, :]
        accs = tl.load(sums + at, mask=is_sum, other=0.0, cache_modifier=".cg")
        new_highest = tl.maximum(highest, tl.max(highs, 0))
        weights, shrink = tl.exp2(highs - new_highest[None, :]), tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights * totals, 0)
        acc = acc * shrink[:, None] + tl.sum(weights[:, :, None] * accs, 0)
        highest = new_highest
    return acc / tl.where(total > 0, total, 1.0)[:, None]
