"""Index arithmetic over ragged rows, in NumPy."""

from __future__ import annotations

import numpy as np


def indptr(lengths: np.ndarray) -> np.ndarray:
    """Offsets int64 [n + 1] of rows of these lengths [n] laid end to end."""
    out = np.zeros(lengths.size + 1, np.int64)
    np.add.accumulate(lengths, out=out[1:])
    return out


def ragged_arange(lengths: np.ndarray) -> np.ndarray:
    """``0 .. length - 1`` for each row in turn, int64 [sum of lengths]."""
    starts = indptr(lengths)
    return np.arange(starts[-1]) - starts[:-1].repeat(lengths)
