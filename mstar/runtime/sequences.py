"""One generated text on its way from the engine's tokens to what a caller reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mstar.conductor.request import EngineRequest, FinishReason, stop_id_of
from mstar.runtime.logprobs import Logprob, positions
from mstar.runtime.params import SamplingParams
from mstar.text.stream import TextStream
from mstar.text.tokenizer import Tokenizer
from mstar.utils.errors import MstarError


@dataclass(frozen=True)
class Completion:
    """One finished text.

    ``finish_reason`` is stop, length or timeout; ``stop_reason`` the stop string or stop id (as text) that ended it,
    None for an end-of-sequence token.  ``num_input_tokens`` counts the prompt.  ``index`` tells the ``n`` texts of a
    prompt apart.  ``logprobs``: per generated token, and ``cumulative_logprob``: their sum, where asked for.
    ``prompt_logprobs``: per prompt token, None for the first, which nothing predicts; with index 0 only.
    """

    output_ids: list[int]
    text: str
    finish_reason: str
    num_input_tokens: int
    index: int = 0
    stop_reason: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(frozen=True)
class Piece:
    """What a stream brought of one text since its last piece; ``finish_reason`` and ``stop_reason`` come with the last.

    ``index`` tells the ``n`` texts apart.  Where asked for: ``logprobs`` of ``output_ids``, ``cumulative_logprob`` of
    all tokens so far, and ``prompt_logprobs`` as a :class:`Completion` has them, with the first piece of index 0.
    """

    output_ids: list[int]
    text: str
    finish_reason: str | None = None
    index: int = 0
    stop_reason: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class TextSequence:
    """State of one text; one thread uses it.

    Tokens come in by :meth:`take`, as ``_fresh`` ids whose text is not made yet; :meth:`absorb` makes it.

    Attributes:
        request: what the engine runs.
        ticket: what the engine knows it by; -1 before it was handed over.
        error: what ended it instead of a finish.
        is_late: the error says that its time was over before it ran.
    """

    def __init__(self, request: EngineRequest, params: SamplingParams, tokenizer: Tokenizer, index: int = 0) -> None:
        self.request = request
        self.ticket = -1
        self.error: MstarError | None = None
        self.is_late = False
        self._params = params
        self._tokenizer = tokenizer
        self._index = index
        self._stream = TextStream(
            tokenizer,
            params.stop,
            params.skip_special_tokens,
            min_tokens=request.min_tokens,
            include_stop=params.include_stop_str_in_output,
        )
        self._ids: list[int] = []
        self._fresh: list[int] = []
        self._records: list[np.ndarray] = []  # LOGPROB [1] per id of _ids and _fresh, where asked for
        self._prompt_records: np.ndarray | None = None
        self._num_summed, self._total = 0, 0.0  # ids whose log-probabilities are summed up, and their sum
        self._texts: list[str] = []  # not in a piece yet
        self._num_sent = 0  # ids that were in a piece
        self._has_sent = False  # a piece at all
        self._is_complete = False  # all text is made
        self._finish = FinishReason.RUNNING
        self._stop_reason: str | None = None

    @property
    def is_done(self) -> bool:
        return self._finish is not FinishReason.RUNNING or self.error is not None

    @property
    def has_news(self) -> bool:
        """Something that may make a piece, or an error; how a late text ends is not known before the others' ends."""
        return bool(self._fresh or self._texts or (self.is_done and not self.is_late))

    @property
    def num_tokens(self) -> int:
        """Tokens that count as output, as far as their text was made."""
        return self._stream.num_tokens

    def take(self, token: int, finish: int, record: np.ndarray | None) -> bool:
        """Adds a row of the engine: a token or a code for none, and how the row stands.

        Args:
            record: LOGPROB [1] of the token, where asked for.

        Returns:
            Whether the text must be made now, because a stop string may end it.
        """
        stop_id = stop_id_of(token)
        if stop_id is not None:
            self._stop_reason = str(stop_id)
            token = stop_id if self._params.include_stop_str_in_output else token
        if token >= 0:
            self._fresh.append(token)
            if record is not None:
                self._records.append(record)
        if finish:
            self._finish = FinishReason(finish)
        return bool(self._params.stop)

    def take_prompt(self, records: np.ndarray) -> None:
        """Adds what the engine tells of the prompt: LOGPROB [prompt tokens - 1]."""
        self._prompt_records = records

    def fail(self, error: MstarError, is_late: bool) -> None:
        """The text ends with an error."""
        self.error, self.is_late = error, is_late

    def end_late(self) -> None:
        """Ends a late text, beside others of its prompt that ran, as one without tokens at that time."""
        self.error, self.is_late, self._finish = None, False, FinishReason.TIMEOUT

    def absorb(self) -> bool:
        """Makes the text of what came; True when a stop string ended it while the engine still runs it."""
        if self._is_complete:
            return False
        text = self._stream.push(self._fresh)
        self._ids += self._fresh
        self._fresh = []
        was_running = not self.is_done
        if self.is_done and self._stream.matched_stop is None:
            text += self._stream.finish()
        if text:
            self._texts.append(text)
        if self._stream.matched_stop is not None:
            del self._ids[self._stream.num_tokens :]
            del self._records[self._stream.num_tokens :]
            self._finish, self._stop_reason = FinishReason.STOP, self._stream.matched_stop
        self._is_complete = self.is_done
        return was_running and self.is_done

    def piece(self) -> Piece | None:
        """What is new since the last piece, after :meth:`absorb`; None where nothing may be shown yet."""
        text, self._texts = "".join(self._texts), []
        if not (text or self.is_done):
            return None
        start, self._num_sent = self._num_sent, len(self._ids)
        is_first, self._has_sent = not self._has_sent, True
        return Piece(
            output_ids=self._ids[start:],
            text=text,
            finish_reason=self._finish.text if self.is_done else None,
            index=self._index,
            stop_reason=self._stop_reason if self.is_done else None,
            logprobs=self._logprobs(start),
            cumulative_logprob=self._cumulative_logprob(),
            prompt_logprobs=self._prompt_logprobs() if is_first else None,
        )

    def completion(self) -> Completion:
        """The whole text, once it is done and if no piece was made of it."""
        self.absorb()
        return Completion(
            output_ids=self._ids,
            text="".join(self._texts),
            finish_reason=self._finish.text,
            num_input_tokens=self.request.num_prompt_tokens,
            index=self._index,
            stop_reason=self._stop_reason,
            logprobs=self._logprobs(0),
            cumulative_logprob=self._cumulative_logprob(),
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _logprobs(self, start: int) -> list[dict[int, Logprob]] | None:
        num_top = self.request.num_logprobs
        if num_top < 0:
            return None
        records = self._records[start : len(self._ids)]
        return positions(np.concatenate(records), self._ids[start:], num_top, self._tokenizer) if records else []

    def _cumulative_logprob(self) -> float | None:
        if self.request.num_logprobs < 0:
            return None
        self._total += sum(float(record["logprob"][0]) for record in self._records[self._num_summed : len(self._ids)])
        self._num_summed = len(self._ids)
        return self._total

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        num_top = self.request.num_prompt_logprobs
        if num_top < 0:
            return None
        if self._prompt_records is None:
            return [None]
        ids = self.request.prompt_array()[1:]
        return [None, *positions(self._prompt_records, ids, num_top, self._tokenizer)]
