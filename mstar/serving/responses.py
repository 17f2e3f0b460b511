"""One open request: its tokens turned into the responses the contract promises."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mstar.runtime.messages import FinishReason
from mstar.serving.contract import OUTPUT_BY_NAME
from mstar.text.stream import TextStream
from mstar.utils.errors import ErrorCode


@dataclass(frozen=True)
class Chunk:
    """The content of one response; ``finish_reason`` is set on the last one only."""

    text: str
    token_ids: tuple[int, ...] | None
    num_input_tokens: int
    num_output_tokens: int
    finish_reason: str | None = None

    def tensors(self, wanted: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Arrays by output name, leaving out those not in ``wanted`` (None: all)."""
        values: dict[str, list[bytes] | list[int] | tuple[int, ...]] = {
            "text_output": [self.text.encode()],
            "num_input_tokens": [self.num_input_tokens],
            "num_output_tokens": [self.num_output_tokens],
        }
        if self.token_ids is not None:
            values["output_ids"] = self.token_ids
        if self.finish_reason is not None:
            values["finish_reason"] = [self.finish_reason.encode()]
        return {
            name: np.array(value, dtype=OUTPUT_BY_NAME[name].numpy_type)
            for name, value in values.items()
            if wanted is None or name in wanted
        }


class Reply(Protocol):
    """Where a request's responses go; after the last one (``final=True``, or ``fail``) nothing may follow."""

    def send(self, chunk: Chunk, *, final: bool) -> None: ...

    def fail(self, code: ErrorCode, message: str) -> None: ...

    def is_cancelled(self) -> bool: ...


class Stream:
    """State of one open request. Only the thread of its sender shard touches it after it was opened."""

    __slots__ = (
        "_held_ids",
        "_held_text",
        "_look_now",
        "_num_reported",
        "_num_tokens",
        "_prefix",
        "_return_ids",
        "_streaming",
        "_text",
        "_unread",
        "is_cancelled",
        "num_input_tokens",
        "reply",
        "request_id",
    )

    def __init__(
        self,
        reply: Reply,
        text: TextStream,
        num_input_tokens: int,
        *,
        streaming: bool,
        has_stop: bool = False,
        return_token_ids: bool = False,
        prefix: str = "",
        request_id: str = "",
    ) -> None:
        """``prefix`` is the prompt's text where the answer is to repeat it (not when streaming)."""
        self.reply = reply
        self.num_input_tokens = num_input_tokens
        self.request_id = request_id
        self.is_cancelled = False  # written by the cancel loop
        self._text = text
        self._streaming = streaming
        self._look_now = streaming or has_stop  # else the text is only made at the end
        self._return_ids = return_token_ids
        self._prefix = prefix
        self._unread: list[np.ndarray] = []  # tokens whose text nobody needs yet
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

    def take(self, tokens: np.ndarray, finish: int) -> Chunk | None:
        """Add tokens (int32; negative: a row that ended without one) and return what may be sent now, if anything.

        ``finish`` is the row's FinishReason, 0 while it runs. A returned chunk with ``finish_reason`` is the last.
        """
        tokens = tokens[tokens >= 0]
        if not self._look_now and not finish:
            self._unread.append(tokens)
            self._num_tokens += tokens.size
            return None
        ids = np.concatenate([*self._unread, tokens]).tolist()
        self._num_tokens += tokens.size
        self._unread.clear()
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
        if finish or (self._streaming and text):
            return self._chunk(FinishReason(finish).text if finish else None)
        return None

    def _chunk(self, finish_reason: str | None) -> Chunk:
        chunk = Chunk(
            text=self._prefix + "".join(self._held_text),
            token_ids=tuple(self._held_ids) if self._return_ids else None,
            num_input_tokens=self.num_input_tokens,
            num_output_tokens=self._num_tokens - self._num_reported,
            finish_reason=finish_reason,
        )
        self._num_reported = self._num_tokens
        self._held_text.clear()
        self._held_ids.clear()
        return chunk
