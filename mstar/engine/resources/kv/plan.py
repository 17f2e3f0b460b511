"""The index arrays of one step over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mstar.engine.resources.ragged import ragged_arange


@dataclass(frozen=True)
class KVPlan:
    """What attention and positions read of a step.  ``B`` padded rows, ``n`` new tokens in row order.

    Arrays are NumPy on the host, but for ``key_index`` and ``value_index``: int64 [n] on the device, where each new
    token's key and value are stored in a layer seen as [pages * 2 * page_size, kv heads, head_dim].  ``kv_lens``
    includes the new tokens; the pages of row ``i`` are ``page_table[i, :ceil(kv_lens[i] / page_size)]``, the sink
    page where the row owns none.
    """

    starts: np.ndarray  # int64 [B], tokens stored before the step
    spans: np.ndarray  # int64 [B], new tokens
    kv_lens: np.ndarray  # int64 [B]
    qo_indptr: np.ndarray  # int64 [B + 1]
    page_table: np.ndarray  # int32 [B, most pages of any row]
    key_index: torch.Tensor
    value_index: torch.Tensor
    is_decode: bool  # every row has exactly one new token

    @property
    def num_tokens(self) -> int:
        return int(self.qo_indptr[-1])


def write_addresses(starts: np.ndarray, spans: np.ndarray, page_table: np.ndarray, page_size: int) -> np.ndarray:
    """Where each new token's key is stored, int64 [sum of spans]; its value lies ``page_size`` further.

    ``starts`` and ``spans`` int64 [B]; ``page_table`` int32 [B, pages].  Positions past a row's last column, which
    only padding rows have, take its last page.
    """
    if (spans == 1).all():
        rows, position = np.arange(spans.size), starts
    else:
        rows = np.repeat(np.arange(spans.size), spans)
        position = np.repeat(starts, spans) + ragged_arange(spans)
    page, offset = np.divmod(position, page_size)
    return page_table[rows, np.minimum(page, page_table.shape[1] - 1)].astype(np.int64) * (2 * page_size) + offset
