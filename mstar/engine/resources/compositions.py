"""What was worked out for a composition of a batch, found again while it holds."""

from __future__ import annotations

from collections import deque
from typing import Generic, NamedTuple, TypeVar

import numpy as np

_T = TypeVar("_T")
_MOST_KEPT = 4  # that take turns: a few walks, rows that sit out every second step


class _Kept(NamedTuple, Generic[_T]):
    version: int
    rows: np.ndarray
    others: tuple[object, ...]
    made: _T


class Compositions(Generic[_T]):
    """What was made for the last few compositions.

    A composition is its master rows int64 [bs], whatever ``others`` it is told apart by, and its owner's ``version``,
    which moves whenever something about a row does.
    """

    def __init__(self, most: int = _MOST_KEPT) -> None:
        """``most``: compositions that are kept; 1 for what lies in the one place that the next is written to."""
        self._kept: deque[_Kept[_T]] = deque(maxlen=most)

    def find(self, version: int, rows: np.ndarray, *others: object) -> _T | None:
        for kept in self._kept:
            is_named = kept.version == version and kept.others == others
            if is_named and (kept.rows is rows or np.array_equal(kept.rows, rows)):
                return kept.made
        return None

    def keep(self, made: _T, version: int, rows: np.ndarray, *others: object) -> _T:
        """Returns ``made``.  ``rows`` must stay as they are."""
        self._kept.appendleft(_Kept(version, rows, others, made))
        return made
