"""A model without a server: prompts in, texts out, in this process or with the engine in a child."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from mstar.conductor.request import EngineRequest, FinishReason
from mstar.model.front import ModelFront, open_front
from mstar.runtime.drivers import Driver, InChild, InProcess
from mstar.runtime.messages import Welcome
from mstar.runtime.options import parse_options
from mstar.runtime.params import SamplingParams, split_parameters
from mstar.runtime.prepare import prepare_request
from mstar.runtime.requests import Params, Prompt, as_prompts, named_params, split_request
from mstar.text.stream import TextStream
from mstar.utils.errors import Cancelled, EngineFault, ErrorCode, InvalidArgument, MstarError, Unavailable

__all__ = ["LLM", "Completion", "Piece", "SamplingParams"]

UNBOUNDED_QUEUE = 2**24


@dataclass(frozen=True)
class Completion:
    """One finished request.  ``finish_reason`` is stop or length; ``num_input_tokens`` counts the prompt."""

    output_ids: list[int]
    text: str
    finish_reason: str
    num_input_tokens: int


@dataclass(frozen=True)
class Piece:
    """What a stream brought since the last piece; ``finish_reason`` is set on the last one."""

    output_ids: list[int]
    text: str
    finish_reason: str | None = None


@dataclass
class _Sequence:
    """A request on its way.  ``fresh`` ids are not yet in ``ids`` and ``text``."""

    request: EngineRequest
    params: SamplingParams
    stream: TextStream
    ticket: int = -1
    ids: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish: FinishReason = FinishReason.RUNNING
    error: MstarError | None = None

    @property
    def is_done(self) -> bool:
        return self.finish is not FinishReason.RUNNING or self.error is not None

    def absorb(self) -> bool:
        """Moves fresh ids into the text; True when a stop string ended it there."""
        self.texts.append(self.stream.push(self.fresh))
        self.ids += self.fresh
        self.fresh = []
        if self.is_done and self.stream.matched_stop is None:
            self.texts.append(self.stream.finish())
        if self.stream.matched_stop is None:
            return False
        del self.ids[self.stream.num_tokens :]
        was_running = not self.is_done
        self.finish = FinishReason.STOP
        return was_running


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
        self._open: dict[int, _Sequence] = {}
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
        """Runs all prompts as one batch; completions come in their order.

        Args:
            prompts: texts, token ids, chats (lists of messages), or whole requests: mappings of one of
                ``text_input``/``prompt``, ``input_ids``/``prompt_ids``, ``messages``, and any parameters, also
                under ``sampling_parameters``.  One of these, or a list of them.
            params: for all, or one per prompt; a request's own parameters win.

        Raises:
            InvalidArgument: a prompt or parameter is outside its contract; nothing was run.
            EngineFault: the engine failed.
        """
        each = as_prompts(prompts)
        per_prompt = params if isinstance(params, Sequence) else [params] * len(each)
        if len(per_prompt) != len(each):
            raise InvalidArgument("params", f"one for all or {len(each)}, one per prompt", len(per_prompt))
        sequences = [self._prepare(prompt, own) for prompt, own in zip(each, per_prompt, strict=True)]
        waiting, pending = deque(sequences), list(sequences)
        try:
            self._submit(waiting)
            while pending:
                if pending[-1].is_done:
                    pending.pop()
                else:
                    self._pump()
                    self._submit(waiting)
        finally:
            self._abandon(sequences)
        for sequence in sequences:
            if sequence.error is not None:
                raise sequence.error
        return [self._complete(sequence) for sequence in sequences]

    def stream(self, prompt: Prompt, params: Params | None = None) -> Iterator[Piece]:
        """The completion of one prompt, piece by piece.  Closing the iterator cancels the request.

        Raises:
            InvalidArgument, EngineFault: as :meth:`generate`.
        """
        return self._pieces(self._prepare(prompt, params))

    def close(self) -> None:
        """Ends a child engine; an engine in this process is freed with this object."""
        self.driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _pieces(self, sequence: _Sequence) -> Iterator[Piece]:
        self._submit(deque([sequence]))
        num_sent = 0
        try:
            while True:
                while not (sequence.fresh or sequence.is_done or any(sequence.texts)):
                    self._pump()
                if sequence.error is not None:
                    raise sequence.error
                self._absorb(sequence)
                text, sequence.texts = "".join(sequence.texts), []
                if text or sequence.is_done:
                    piece = sequence.ids[num_sent:]
                    num_sent = len(sequence.ids)
                    yield Piece(piece, text, sequence.finish.text if sequence.is_done else None)
                if sequence.is_done:
                    return
        finally:
            self._abandon([sequence])

    def _prepare(self, prompt: Prompt, params: Params | None) -> _Sequence:
        prompt_part, own = split_request(prompt)
        merged = named_params(params) | own
        sampling, _ = split_parameters(merged)
        request = prepare_request(
            self.front,
            **prompt_part,
            params=sampling,
            front_options=self._front_options,
            context_length=self.info.max_seq_len,
        )
        return _Sequence(
            request, sampling, TextStream(self.front.tokenizer, sampling.stop, sampling.skip_special_tokens)
        )

    def _submit(self, waiting: deque[_Sequence]) -> None:
        """Hands over what the engine takes; a full queue takes the rest later, as long as something runs."""
        while waiting:
            try:
                ticket = self.driver.submit(waiting[0].request)
            except Unavailable:
                if not self._open:
                    raise
                return
            sequence = waiting.popleft()
            sequence.ticket = ticket
            self._open[ticket] = sequence

    def _pump(self) -> None:
        """Takes in the engine's next report; a child may report several steps' rows before they are read."""
        report = self.driver.poll()
        for failure in report.failures:
            sequence = self._open.pop(failure.ticket, None)
            if sequence is not None:
                sequence.error = _error_of(failure.code, failure.message)
        rows = zip(report.tickets.tolist(), report.tokens.tolist(), report.finish.tolist(), strict=True)
        for ticket, token, finish in rows:
            sequence = self._open.get(ticket)
            if sequence is None:
                continue  # made before the engine heard that the text had ended
            if token >= 0:
                sequence.fresh.append(token)
            if finish:
                sequence.finish = FinishReason(finish)
                del self._open[ticket]
            if sequence.params.stop:
                self._absorb(sequence)

    def _absorb(self, sequence: _Sequence) -> None:
        if sequence.absorb():
            self.driver.finish(sequence.ticket, sequence.stream.num_tokens)
            self._open.pop(sequence.ticket, None)

    def _abandon(self, sequences: Sequence[_Sequence]) -> None:
        """Cancels those that still run: an error or the caller ended the call early."""
        for sequence in sequences:
            if self._open.pop(sequence.ticket, None) is not None:
                self.driver.cancel(sequence.ticket)

    def _complete(self, sequence: _Sequence) -> Completion:
        if not sequence.params.stop:
            sequence.absorb()
        return Completion(
            sequence.ids, "".join(sequence.texts), sequence.finish.text, sequence.request.num_prompt_tokens
        )


def _error_of(code: ErrorCode, message: str) -> MstarError:
    """The exception behind an error that came as code and text."""
    if code is ErrorCode.INVALID_ARG:
        error = InvalidArgument.__new__(InvalidArgument)  # its text is already put together
        error.field = message.partition(":")[0]
        error.args = (message,)
        return error
    return {ErrorCode.UNAVAILABLE: Unavailable, ErrorCode.CANCELLED: Cancelled}.get(code, EngineFault)(message)
