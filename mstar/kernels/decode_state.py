"""What a decode step reads of its rows and what it moves on, where lengths and positions lie on the device.

Captured steps compute these themselves, so that an unchanged batch is replayed without anything sent to the device.
Kernels of :mod:`mstar.kernels.cuda.decode_state` take the same arguments.
"""

from __future__ import annotations

import torch

from mstar.kernels import rope


def next_tokens_reference(
    streams: torch.Tensor,
    advances: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    kv_lens: torch.Tensor,
    key_index: torch.Tensor,
    value_index: torch.Tensor,
    page_size: int,
) -> None:
    """Each row's next token: how many tokens the row has with it, and where its key and value are stored.

    Args:
        streams: int32 [B], distinct.
        advances: int32 [B], what is added to each stream's length; 0 leaves it as it is.
        lengths: int32 [streams], tokens stored before; moved on.
        table: int32 [streams, width], pages of each stream.
        kv_lens: int32 [B], written.
        key_index, value_index: int64 [B], written; rows of a layer seen as [pages * 2 * page_size, Hkv, D].
    """
    stream = streams.long()
    before = lengths.index_select(0, stream)
    torch.add(before, 1, out=kv_lens)
    page = table.view(-1).index_select(0, stream * table.shape[1] + before // page_size)
    torch.add(page.long() * (2 * page_size), before % page_size, out=key_index)
    torch.add(key_index, page_size, out=value_index)
    lengths.index_add_(0, stream, advances)


def next_positions_reference(
    streams: torch.Tensor,
    advances: torch.Tensor,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    ids: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    factor: float,
    interleave: bool,
) -> None:
    """Each row's position, and the tables by which :func:`mstar.kernels.rope.rotate` turns its heads.

    Args:
        streams: int32 [B], distinct.
        advances: int32 [B], what is added to each stream's position.
        positions: int32 [streams], moved on.
        frequencies: fp32 [rotary_dim / 2].
        ids: int64 [B], written.
        cos, sin: [B, 1, rotary_dim] of any float dtype, written; both are multiplied with ``factor``.
    """
    stream = streams.long()
    ids.copy_(positions.index_select(0, stream))
    rope.cos_sin(ids, frequencies, interleave, factor=factor, out=(cos, sin))
    positions.index_add_(0, stream, advances)
