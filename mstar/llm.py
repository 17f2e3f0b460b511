"""A model without a server: prompts in, texts out, in this process or with the engine in a child."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Literal, Self

import msgspec

from mstar.conductor.deadlines import is_late
from mstar.model.front import ModelFront, open_front
from mstar.runtime.drivers import Driver, InChild, InProcess
from mstar.runtime.messages import Welcome
from mstar.runtime.options import parse_options
from mstar.runtime.params import SamplingParams, split_parameters
from mstar.runtime.prepare import prepare_request, sequences_of
from mstar.runtime.requests import Params, Prompt, as_prompts, named_params, split_request
from mstar.runtime.sequences import Completion, Piece, TextSequence
from mstar.utils.errors import Cancelled, EngineFault, ErrorCode, InvalidArgument, MstarError, Unavailable

__all__ = ["LLM", "Completion", "Piece", "SamplingParams"]

UNBOUNDED_QUEUE = 2**24


class LLM:
    """A loaded model.  Not for use from several threads.

    ``LLM("smollm2-135m").generate("Hello")[0].text``

    Args:
        model: a folder, a .gguf file, a Hugging Face id, or an alias.
        engine: ``inprocess``, or ``process`` for a child process.
        options: engine options and defaults by name, see :data:`mstar.runtime.options.OPTIONS`.

    Raises:
        LoadError: the model or an option cannot be used; names it.
    """

    def __init__(self, model: str, *, engine: Literal["inprocess", "process"] = "inprocess", **options: Any) -> None:
        if engine not in ("inprocess", "process"):
            raise InvalidArgument("engine", "inprocess or process", engine)
        engine_options, self._front_options = parse_options(
            {"max_queued_requests": UNBOUNDED_QUEUE} | options | {"model": model}
        )
        self.front: ModelFront = open_front(model)
        self._open: dict[int, TextSequence] = {}
        self.driver: Driver = (
            InProcess(engine_options) if engine == "inprocess" else InChild(model, engine_options, self._front_options)
        )

    @property
    def info(self) -> Welcome:
        """The engine's model and limits."""
        return self.driver.info

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None = None
    ) -> list[Completion]:
        """Runs all prompts as one batch; completions come in their order, ``n`` of each prompt together.

        Args:
            prompts: texts, token ids, chats (lists of messages), or whole requests: mappings of one of
                ``text_input``/``prompt``, ``input_ids``/``prompt_ids``, ``messages``, and any parameters, also
                under ``sampling_parameters``.  One of these, or a list of them.
            params: for all, or one per prompt; a request's own parameters win.

        All requests are checked before any runs, their guides included.  Only an engine in a child process compiles
        guides when their requests come to run, while others may run already.  The first failure ends the call; what
        else it runs is cancelled.

        Raises:
            InvalidArgument: a prompt or parameter is outside its contract: nothing was run, except where a child
                engine refuses a guide; or a request's constraints left it no token, as it ran.
            Unsupported: a prompt or parameter asks for what the model or this engine lacks; nothing was run.
            Unavailable: a request's time was over before any of its texts could run.
            EngineFault: the engine failed.
        """
        each = as_prompts(prompts)
        per_prompt = params if isinstance(params, Sequence) else [params] * len(each)
        if len(per_prompt) != len(each):
            raise InvalidArgument("params", f"one for all or {len(each)}, one per prompt", len(per_prompt))
        prepared = [self._prepare(prompt, own) for prompt, own in zip(each, per_prompt, strict=True)]
        for first, *_ in prepared:
            self.driver.check(first.request)
        sequences = [sequence for texts in prepared for sequence in texts]
        waiting, pending = deque(sequences), list(sequences)
        try:
            self._submit(waiting)
            while pending:
                if pending[-1].is_done:
                    pending.pop()
                    continue
                if self._pump():
                    _raise_first(prepared)
                self._submit(waiting)
            _raise_first(prepared)
        finally:
            self._abandon(sequences)
        for texts in prepared:
            _end_late([text for text in texts if text.is_late], texts)
        return [sequence.completion() for sequence in sequences]

    def stream(self, prompt: Prompt, params: Params | None = None) -> Iterator[Piece]:
        """The completion of one prompt, piece by piece.  Closing the iterator cancels the request.

        With ``n`` above 1 pieces of all texts come as they are made, told apart by their ``index``.

        Raises:
            InvalidArgument, Unsupported, Unavailable, EngineFault: as :meth:`generate`.
        """
        return self._pieces(self._prepare(prompt, params))

    def check(self, prompt: Prompt, params: Params | None = None) -> None:
        """Raises what :meth:`generate` would raise for a prompt that cannot be run; runs nothing.

        A guide is compiled, and kept for later requests.  An engine in a child process is not asked: what the guide's
        grammar is refused for shows when it is run.
        """
        first, *_ = self._prepare(prompt, params)
        self.driver.check(first.request)

    def close(self) -> None:
        """Ends a child engine; an engine in this process is freed with this object."""
        self.driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _pieces(self, sequences: list[TextSequence]) -> Iterator[Piece]:
        waiting, unfinished = deque(sequences), list(sequences)
        try:
            self._submit(waiting)
            while unfinished:
                _end_late(unfinished, sequences)
                if not any(sequence.has_news for sequence in unfinished):
                    self._pump()
                    self._submit(waiting)
                for sequence in list(unfinished):
                    _raise_error(sequence, sequences)
                    if sequence.is_late:
                        continue
                    self._absorb(sequence)
                    piece = sequence.piece()
                    if piece is None:
                        continue
                    if piece.finish_reason is not None:
                        unfinished.remove(sequence)
                    yield piece
        finally:
            self._abandon(sequences)

    def _prepare(self, prompt: Prompt, params: Params | None) -> list[TextSequence]:
        """The texts that a prompt asks for."""
        prompt_part, own = split_request(prompt)
        sampling, response = split_parameters(named_params(params) | own)
        if response.exclude_input_in_output is False:
            raise InvalidArgument("exclude_input_in_output", "true or absent: only the completion is returned", False)
        if sampling.logprobs is None and (response.return_log_probs or response.return_cumulative_logprob):
            sampling = msgspec.structs.replace(sampling, logprobs=0)
        request = prepare_request(
            self.front,
            **prompt_part,
            params=sampling,
            front_options=self._front_options,
            context_length=self.info.max_seq_len,
        )
        return [
            TextSequence(each, sampling, self.front.tokenizer, index)
            for index, each in enumerate(sequences_of(request, sampling.n))
        ]

    def _submit(self, waiting: deque[TextSequence]) -> None:
        """Hands over what the engine takes; a full queue takes the rest later, as long as something runs."""
        while waiting:
            try:
                ticket = self.driver.submit(waiting[0].request)
            except Unavailable as error:
                if is_late(error.code, str(error)):
                    waiting.popleft().fail(error, True)
                    continue
                if not self._open:
                    raise
                return
            sequence = waiting.popleft()
            sequence.ticket = ticket
            self._open[ticket] = sequence

    def _pump(self) -> bool:
        """Takes in the engine's next report; a child may report several steps' rows before they are read.

        Returns:
            Whether something failed.
        """
        report = self.driver.poll()
        for failure in report.failures:
            sequence = self._open.pop(failure.ticket, None)
            if sequence is not None:
                error = _error_of(failure.code, failure.message)
                sequence.fail(error, is_late(failure.code, failure.message))
        for prompt in report.prompt_logprobs:
            if prompt.ticket in self._open:
                self._open[prompt.ticket].take_prompt(prompt.logprobs)
        records = {} if report.logprob_rows is None else dict(zip(report.logprob_rows.tolist(), count(), strict=False))
        rows = zip(report.tickets.tolist(), report.tokens.tolist(), report.finish.tolist(), strict=True)
        for row, (ticket, token, finish) in enumerate(rows):
            sequence = self._open.get(ticket)
            if sequence is None:
                continue  # made before the engine heard that the text had ended
            at = records.get(row)
            record = None if at is None or report.logprobs is None else report.logprobs[at : at + 1]
            may_stop = sequence.take(token, finish, record)
            if finish:
                del self._open[ticket]
            if may_stop:
                self._absorb(sequence)
        return bool(report.failures)

    def _absorb(self, sequence: TextSequence) -> None:
        if sequence.absorb():
            self.driver.finish(sequence.ticket, sequence.num_tokens)
            self._open.pop(sequence.ticket, None)

    def _abandon(self, sequences: Sequence[TextSequence]) -> None:
        """Cancels those that still run: an error or the caller ended the call early."""
        for sequence in sequences:
            if self._open.pop(sequence.ticket, None) is not None:
                self.driver.cancel(sequence.ticket)


def _raise_first(prepared: Sequence[Sequence[TextSequence]]) -> None:
    for texts in prepared:
        for text in texts:
            _raise_error(text, texts)


def _raise_error(text: TextSequence, texts: Sequence[TextSequence]) -> None:
    """Raises what ended one of a prompt's texts, unless it is late and others of them are not."""
    if text.error is not None and (not text.is_late or all(each.is_late for each in texts)):
        raise text.error


def _end_late(left: Sequence[TextSequence], texts: Sequence[TextSequence]) -> None:
    """Ends those of a prompt's texts that are ``left``, if all these are late and others ran."""
    if len(left) < len(texts) and all(text.is_late for text in left):
        for text in left:
            text.end_late()


def _error_of(code: ErrorCode, message: str) -> MstarError:
    """The exception behind an error that came as code and text."""
    if code is ErrorCode.INVALID_ARG:
        error = InvalidArgument.__new__(InvalidArgument)  # its text is already put together
        error.field = message.partition(": ")[0] if ": " in message else ""
        error.args = (message,)
        return error
    return {ErrorCode.UNAVAILABLE: Unavailable, ErrorCode.CANCELLED: Cancelled}.get(code, EngineFault)(message)
