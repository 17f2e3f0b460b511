"""The text of one response: detokenised as tokens come, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mstar.text.detokenizer import Detokenizer
from mstar.text.tokenizer import Tokenizer


class TextStream:
    """Text that may be sent now, for one sequence of generated tokens.

    The match that ends a text is the one completed first; of several completed by the same character, the longest.
    Text before it is delivered, its own characters never are.  Only what may still become a stop string is held back:
    at most the longest stop string less one character.  Neither text nor match depends on how the tokens are split
    into pushes.

    Attributes:
        matched_stop: the stop string that ended the text, or None.
        num_tokens: tokens pushed so far; after a match, those up to and including the one that completed it.
    """

    __slots__ = ("_detokenizer", "_held", "_stops", "matched_stop", "num_tokens")

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens)
        self._stops = sorted(filter(None, stop), key=len, reverse=True)
        self._held = ""
        self.matched_stop: str | None = None
        self.num_tokens = 0

    def push(self, ids: Sequence[int] | np.ndarray) -> str:
        """Take the next tokens (any number); returns the text they release.  After a match it is always empty."""
        if not self._stops:
            self.num_tokens += len(ids)
            return self._detokenizer.push(ids)
        if self.matched_stop is not None:
            return ""
        before = self._detokenizer.fork()
        text = self._held + self._detokenizer.push(ids)
        end = self._find_stop(text)
        if end is None:
            self.num_tokens += len(ids)
            return self._release(text)
        self.num_tokens += _tokens_until(before, ids, end - len(self._held))
        return self._cut(text, end)

    def finish(self) -> str:
        """The rest of the text: what was held back, and one U+FFFD for an unfinished character."""
        if self.matched_stop is not None:
            return ""
        text = self._held + self._detokenizer.flush()
        self._held = ""
        end = self._find_stop(text)
        return text if end is None else self._cut(text, end)

    def _find_stop(self, text: str) -> int | None:
        """End of the first completed match, which ``matched_stop`` then names."""
        first_end: int | None = None
        for stop in self._stops:  # longest first: of equal ends, the longest stays
            limit = len(text) if first_end is None else first_end - 1
            start = text.find(stop, 0, limit)
            if start >= 0:
                first_end = start + len(stop)
                self.matched_stop = stop
        return first_end

    def _cut(self, text: str, end: int) -> str:
        assert self.matched_stop is not None
        self._held = ""
        return text[: end - len(self.matched_stop)]

    def _release(self, text: str) -> str:
        keep = max(_prefix_length(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _prefix_length(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins (and is not complete)."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0


def _tokens_until(detokenizer: Detokenizer, ids: Sequence[int] | np.ndarray, num_characters: int) -> int:
    """How many of ``ids`` it takes to complete ``num_characters``."""
    for count, token_id in enumerate(ids, start=1):
        num_characters -= len(detokenizer.push((token_id,)))
        if num_characters <= 0:
            return count
    return len(ids)
