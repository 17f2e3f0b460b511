"""One open sequence: its tokens turned into the chunks the contract promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mstar.conductor.request import stop_id_of
from mstar.runtime.messages import FinishReason
from mstar.serving.chunks import Chunk
from mstar.serving.logprobs import TokenLogprobs
from mstar.text.stream import TextStream


class Stream:
    """State of one sequence.  After it was opened, only the sender thread that holds its request touches it."""

    __slots__ = (
        "_held_ids",
        "_held_text",
        "_include_stop",
        "_look_now",
        "_num_reported",
        "_num_tokens",
        "_once",
        "_prefix",
        "_return_ids",
        "_sequence_index",
        "_streaming",
        "_text",
        "_told",
        "_unread",
        "_unread_records",
        "num_input_tokens",
    )

    def __init__(
        self,
        text: TextStream,
        num_input_tokens: int,
        *,
        streaming: bool,
        has_stop: bool = False,
        include_stop: bool = False,
        return_token_ids: bool = False,
        logprobs: TokenLogprobs | None = None,
        prefix: str = "",
        sequence_index: int | None = None,
    ) -> None:
        """What is asked of the sequence.

        ``has_stop``: ``text`` looks for stop strings.  ``include_stop``: a stop id that ends the row counts as output
        (``text`` knows itself whether stop strings do).  ``prefix`` is the prompt's text where the answer is to repeat
        it (not when streaming).  ``sequence_index`` is None for a request's only sequence.
        """
        self.num_input_tokens = num_input_tokens
        self._text = text
        self._streaming = streaming
        self._look_now = streaming or has_stop  # else the text is only made at the end
        self._include_stop = include_stop
        self._return_ids = return_token_ids
        self._told = logprobs
        self._prefix = prefix
        self._sequence_index = sequence_index
        self._once: dict[str, Any] = {}  # what the next chunk alone says
        self._unread: list[int] = []  # tokens whose text nobody needs yet
        self._unread_records: list[np.ndarray] = []
        self._held_text: list[str] = []  # made, not sent
        self._held_ids: list[int] = []  # ids not sent, when they are asked for
        self._num_tokens = 0  # tokens that count so far
        self._num_reported = 0  # tokens told to the client

    @property
    def num_tokens(self) -> int:
        """Tokens that count as output: after a stop string's match, up to the token that completed it."""
        return self._num_tokens

    @property
    def matched_stop(self) -> bool:
        return self._text.matched_stop is not None

    def tell_prompt(self, prompt_logprobs: str) -> None:
        """JSON for the first chunk; before any token."""
        self._once["prompt_logprobs"] = prompt_logprobs

    def take(self, tokens: Sequence[int], finish: int, records: np.ndarray | None = None) -> Chunk | None:
        """Add rows and return what may be sent now, if anything.

        Args:
            tokens: [n]; negative where the row brings no output, or names the stop id that ended it.
            finish: the last row's FinishReason, 0 while it runs.  A chunk with ``finish_reason`` is the last.
            records: LOGPROB [n], one per row; needed where log-probabilities are told.
        """
        stop_id = stop_id_of(tokens[-1]) if finish else None
        if stop_id is not None and self._include_stop:
            tokens = [*tokens[:-1], stop_id]
        if self._told is not None and records is not None:
            self._unread_records.append(records[np.array(tokens) >= 0])
        if min(tokens) < 0:
            tokens = [token for token in tokens if token >= 0]
        self._num_tokens += len(tokens)
        self._unread.extend(tokens)
        if not self._look_now and not finish:
            return None
        ids, self._unread = self._unread, []
        text = self._text.push(ids)
        if finish and self._text.matched_stop is None:
            text += self._text.finish()
        if self._text.matched_stop is not None:
            surplus = self._num_tokens - self._text.num_tokens
            ids = ids[: len(ids) - surplus]
            self._num_tokens -= surplus
            finish = FinishReason.STOP
        if text:
            self._held_text.append(text)
        if self._return_ids:
            self._held_ids.extend(ids)
        if self._told is not None and self._unread_records:
            self._told.add(ids, np.concatenate(self._unread_records)[: len(ids)])
            self._unread_records.clear()
        if finish or (self._streaming and text):
            return self._chunk(FinishReason(finish) if finish else None, stop_id)
        return None

    def _chunk(self, finish: FinishReason | None, stop_id: int | None) -> Chunk:
        told, self._once = self._once, {}
        if self._told is not None:
            told |= self._told.tell()
        if finish is not None:
            told["finish_reason"] = finish.text
            told["stop_reason"] = self._text.matched_stop or (None if stop_id is None else str(stop_id))
        chunk = Chunk(
            text=self._prefix + "".join(self._held_text),
            token_ids=tuple(self._held_ids) if self._return_ids else None,
            num_input_tokens=self.num_input_tokens,
            num_output_tokens=self._num_tokens - self._num_reported,
            sequence_index=self._sequence_index,
            **told,
        )
        self._num_reported = self._num_tokens
        self._held_text.clear()
        self._held_ids.clear()
        return chunk
