"""How much memory FlashInfer's plans take: what its host planner would allot, in closed form.

From ``include/flashinfer/attention/scheduler.cuh`` of FlashInfer 0.6.13.  Rows' keys may be split over several thread
blocks, whose partial results (fp32 values and one sum a head) pass through the float workspace; which block does what
lies in the int workspace.
"""

from __future__ import annotations

from dataclasses import dataclass

_BLOCKS_PER_SM = 2  # that FlashInfer's prefill plan reckons with
_MOST_BLOCKS_PER_SM = 32  # that any kernel can have resident; its decode plan asks the driver
_SLACK = 1024  # alignment of the parts


@dataclass(frozen=True)
class HeadShape:
    """Heads of one rank; ``num_sms`` multiprocessors of its device."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    num_sms: int

    @property
    def group(self) -> int:
        """Query heads of one kv head: they share a tile of queries."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def row_floats(self) -> int:
        """fp32 numbers of one head's partial result."""
        return self.head_dim + 1

    def query_tile(self, queries: int) -> int:
        """Rows of the tile that FlashInfer takes for ``queries`` (tokens times group) of a row."""
        if queries > 64 and self.head_dim < 256:
            return 128
        return 64 if queries > 16 else 16


def eager_float_bytes(heads: HeadShape) -> int:
    """The most that any plan outside a capture takes: its split ends where blocks outnumber the device's."""
    tiles = _BLOCKS_PER_SM * heads.num_sms // heads.num_kv_heads
    prefill = heads.num_qo_heads * tiles * heads.query_tile(1 << 20) * heads.row_floats * 4
    return max(prefill, decode_float_bytes(heads)) + _SLACK


def decode_float_bytes(heads: HeadShape) -> int:
    """The most that the CUDA-core decode kernel takes, captured or not."""
    return heads.group * _MOST_BLOCKS_PER_SM * heads.num_sms * heads.row_floats * 4 + _SLACK


def captured_float_bytes(heads: HeadShape, num_tokens: int, num_rows: int) -> int:
    """What a captured prefill of ``num_tokens`` in ``num_rows`` rows takes when it may split, whatever it holds."""
    blocks, tile = _captured_blocks(heads, num_tokens, num_rows)
    return heads.num_qo_heads * blocks * tile * heads.row_floats * 4 + _SLACK


def captured_int_bytes(heads: HeadShape, num_tokens: int, num_rows: int) -> int:
    """The most that a captured plan of any kernel takes."""
    blocks, _ = _captured_blocks(heads, num_tokens, num_rows)
    split_prefill = 17 * blocks + 4 * num_tokens + 8 * num_rows
    # FlashAttention-3's: 7 numbers for every tile of every head, and each multiprocessor's share.
    whole_prefill = 28 * heads.num_qo_heads * (-(-num_tokens // 128) + num_rows) + 4 * heads.num_sms
    decode = 17 * max(_MOST_BLOCKS_PER_SM * heads.num_sms // heads.num_kv_heads, num_rows)
    return max(split_prefill, whole_prefill, decode) + _SLACK


def _captured_blocks(heads: HeadShape, num_tokens: int, num_rows: int) -> tuple[int, int]:
    """Thread blocks of one kv head in a captured grid, and rows of their query tiles."""
    tile = heads.query_tile((num_tokens - num_rows + 1) * heads.group)
    tiles = -(-num_tokens * heads.group // tile) + num_rows - 1
    return max(_BLOCKS_PER_SM * heads.num_sms // heads.num_kv_heads, tiles), tile
