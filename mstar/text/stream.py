"""The text of one response: detokenised as tokens come, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mstar.text.detokenizer import Detokenizer
from mstar.text.matching import beginning_length
from mstar.text.tokenizer import Tokenizer


class TextStream:
    """Text that may be sent now, for one sequence of generated tokens.

    The match that ends a text is the one completed first; of several completed by the same character, the leftmost,
    which is the longest.  Text before it is delivered, its own characters only with ``include_stop``.  Only what may
    still become a stop string is held back (with ``include_stop`` nothing): at most the longest stop string less one
    character.  Neither text nor match depends on how the tokens are split into pushes.

    The characters that the first ``min_tokens`` tokens complete are delivered unseen: no match includes any of them.

    Args:
        tokenizer: of the model that makes the tokens.
        stop: strings that end the text; empty ones are passed over.
        skip_special_tokens: leave control tokens out of the text.
        min_tokens: tokens in whose text stop strings are not looked for.
        include_stop: the stop string that ended the text is its last part.

    Attributes:
        matched_stop: the stop string that ended the text, or None.
        num_tokens: tokens pushed so far; after a match, those up to and including the one that completed it.
    """

    __slots__ = ("_detokenizer", "_include_stop", "_min_tokens", "_open", "_stops", "matched_stop", "num_tokens")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens)
        self._stops = sorted(filter(None, stop), key=len, reverse=True)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._open = ""  # end of the text that may be the beginning of a match; delivered only with include_stop
        self.matched_stop: str | None = None
        self.num_tokens = 0

    def push(self, ids: Sequence[int] | np.ndarray) -> str:
        """Take the next tokens (any number); returns the text they release.  After a match it is always empty."""
        if not self._stops:
            self.num_tokens += len(ids)
            return self._detokenizer.push(ids)
        if self.matched_stop is not None:
            return ""
        unseen = self._min_tokens - self.num_tokens
        if unseen <= 0:
            return self._push_seen(ids)
        head, rest = ids[:unseen], ids[unseen:]
        self.num_tokens += len(head)
        text = self._detokenizer.push(head)
        return text + self._push_seen(rest) if len(rest) else text

    def finish(self) -> str:
        """The rest of the text: what was held back, and one U+FFFD for an unfinished character."""
        if self.matched_stop is not None:
            return ""
        rest = self._detokenizer.flush()
        if self.num_tokens <= self._min_tokens:
            return rest
        text = self._open + rest
        end = self._find_stop(text)
        return self._deliver(text, len(text)) if end is None else self._cut(text, end)

    def _push_seen(self, ids: Sequence[int] | np.ndarray) -> str:
        """``push`` of tokens in whose text stop strings are looked for."""
        before = self._detokenizer.fork() if len(ids) > 1 else None
        text = self._open + self._detokenizer.push(ids)
        end = self._find_stop(text)
        if end is not None:
            self.num_tokens += 1 if before is None else _tokens_until(before, ids, end - len(self._open))
            return self._cut(text, end)
        self.num_tokens += len(ids)
        keep = max(beginning_length(text, stop) for stop in self._stops)
        return self._deliver(text, len(text) - keep)

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
        return self._deliver(text[:end], end - len(self.matched_stop))

    def _deliver(self, text: str, end: int) -> str:
        """What is new of ``text``, which begins with the open end; from ``end`` on it is open now."""
        new = text[len(self._open) :] if self._include_stop else text[:end]
        self._open = text[end:]
        return new


def _tokens_until(detokenizer: Detokenizer, ids: Sequence[int] | np.ndarray, num_characters: int) -> int:
    """How many of ``ids`` it takes to complete ``num_characters``."""
    for count, token_id in enumerate(ids, start=1):
        num_characters -= len(detokenizer.push((token_id,)))
        if num_characters <= 0:
            return count
    return len(ids)
