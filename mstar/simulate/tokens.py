"""Made-up token ids: those of a stream are the same whoever asks, so a chat's next prompt holds what was answered."""

from __future__ import annotations

import numpy as np

EOS = 0  # no stream holds it
VOCABULARY = 32_000


def stream_tokens(streams: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
    """The ids at ``positions`` int64 [n] of ``streams`` int64 [n] or of one stream, int64 [n] in [1, VOCABULARY).

    A mix of both numbers, the finaliser of SplitMix64.
    """
    with np.errstate(over="ignore"):
        mixed = positions.astype(np.uint64) + np.asarray(streams).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(VOCABULARY - 1)).astype(np.int64) + 1
