"""Counts and marks by master row, for the same rows step after step."""

from __future__ import annotations

import numpy as np


class RowCounts:
    """An int64 per master row [capacity], raised for many rows at a time.

    Raising the very array of rows that was raised last only counts; the sums are written when somebody looks.  So an
    array that was handed in must stay as it is.
    """

    def __init__(self, capacity: int) -> None:
        self._values = np.zeros(capacity, np.int64)
        self._rows = np.empty(0, np.int64)
        self._pending = 0

    @property
    def values(self) -> np.ndarray:
        """The counts, up to date, to read and to write."""
        if self._pending:
            self._values[self._rows] += self._pending
            self._pending = 0
        return self._values

    def raise_by_one(self, rows: np.ndarray) -> None:
        """``rows`` int64 [n], each at most once."""
        if rows is not self._rows:
            _ = self.values
            self._rows = rows
        self._pending += 1


class RowFlags:
    """A bool per master row [capacity], false at first; ``count`` of them are true."""

    def __init__(self, capacity: int) -> None:
        self.values = np.zeros(capacity, bool)
        self.count = 0

    def write(self, row: int, value: bool) -> None:
        if value or self.count:  # mostly nobody's is true
            self.count += int(value) - int(self.values[row])
            self.values[row] = value


class RowMarks:
    """An int64 per master row [capacity], -1 at first, set for many rows at a time.

    As in :class:`RowCounts`, what is set of the same array of rows is written when somebody looks.
    """

    def __init__(self, capacity: int) -> None:
        self._values = np.full(capacity, -1, np.int64)
        self._rows: np.ndarray | None = None  # not written yet
        self._mark = -1

    @property
    def values(self) -> np.ndarray:
        """The marks, up to date, to read and to write."""
        if self._rows is not None:
            self._values[self._rows] = self._mark
            self._rows = None
        return self._values

    def set(self, rows: np.ndarray, mark: int) -> None:
        """``rows`` int64 [n]."""
        if rows is not self._rows:
            _ = self.values
            self._rows = rows
        self._mark = mark
