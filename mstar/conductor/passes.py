"""How often those that wait were passed by later ones."""

from __future__ import annotations

from bisect import bisect_right, insort


class Passes:
    """Of one tenant's requests, by the numbers of their arrival, those that joined before earlier ones.

    A request that waits was passed by every one of them with a higher number; so nobody more often than the oldest.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []  # ascending; lower than that of the oldest that waits are of no use any more

    def of(self, number: int) -> int:
        """How often request ``number``, which waits, was passed."""
        return len(self._numbers) - bisect_right(self._numbers, number)

    def note(self, number: int, oldest: int) -> None:
        """Request ``number`` joins before others that wait, of which ``oldest`` came first."""
        insort(self._numbers, number)
        del self._numbers[: bisect_right(self._numbers, oldest)]
