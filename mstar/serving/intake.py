"""A request's way in: read, checked, tokenised, and opened at the front end. Knows no Triton."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from mstar.model.front import ModelFront
from mstar.runtime.messages import EngineRequest, Welcome
from mstar.runtime.options import EngineOptions, FrontOptions
from mstar.runtime.prepare import prepare_request, sequences_of
from mstar.serving.chunks import Reply
from mstar.serving.frontend import Frontend
from mstar.serving.logprobs import TokenLogprobs, prompt_json
from mstar.serving.parse import ParsedRequest, RawRequest, parse
from mstar.serving.responses import Stream
from mstar.serving.sequences import Sequences
from mstar.text.stream import TextStream
from mstar.utils.errors import InvalidArgument


class Room(NamedTuple):
    """How many requests of one tenant may run, and wait by the option ``bound``."""

    running: int
    waiting: int
    bound: str


def room_of(info: Welcome, options: EngineOptions) -> Room:
    """What an engine with these options has room for."""
    waiting, bound = options.max_queued_requests, "max_queued_requests"
    if 0 < options.max_queued_requests_per_tenant < waiting:
        waiting, bound = options.max_queued_requests_per_tenant, "max_queued_requests_per_tenant"
    return Room(info.max_running_requests, waiting, bound)


class Intake:
    """Turns raw requests into open ones; one for all of a stub's requests."""

    def __init__(
        self,
        front: ModelFront,
        options: FrontOptions,
        frontend: Frontend,
        context_length: int | None = None,
        room: Room | None = None,
    ) -> None:
        """``context_length``: the engine's limit in tokens where it is lower than the model's.  ``room``: the engine's
        for requests."""
        self._front = front
        self._options = options
        self._frontend = frontend
        self._context_length = context_length
        self._room = room

    def take(self, raw: RawRequest, reply: Reply, arrival_ns: int) -> None:
        """Open the request: its responses go to ``reply`` from now on. ``arrival_ns`` is on the monotonic clock.

        Raises InvalidArgument or Unsupported by the field's name, or Unavailable; then nothing was opened, and the
        caller answers.
        """
        asked = parse(raw)
        request = prepare_request(
            self._front,
            text=asked.text,
            input_ids=asked.input_ids,
            messages=asked.messages,
            params=asked.params,
            front_options=self._options,
            context_length=self._context_length,
            arrival_ns=arrival_ns,
        )
        if self._wants_logprobs(asked) and request.num_logprobs < 0:
            request = msgspec.structs.replace(request, num_logprobs=0)
        if self._room is not None:
            _check_has_room(asked.params.n, self._room)
        requests = sequences_of(request, asked.params.n)
        prefix = self._prompt_text(asked, request) if asked.include_prompt else ""
        streams = [
            self._stream(asked, request, prefix, index if len(requests) > 1 else None) for index in range(len(requests))
        ]
        tell_prompt = None
        if request.num_prompt_logprobs >= 0:
            tell_prompt = partial(
                prompt_json,
                prompt_ids=request.prompt_array(),
                num_top=request.num_prompt_logprobs,
                tokenizer=self._front.tokenizer,
            )
        sequences = Sequences(
            reply, streams, streaming=asked.response.stream, tell_prompt=tell_prompt, request_id=raw.request_id
        )
        self._frontend.open(sequences, requests)

    def _stream(self, asked: ParsedRequest, request: EngineRequest, prefix: str, index: int | None) -> Stream:
        params, response = asked.params, asked.response
        logprobs = None
        if request.num_logprobs >= 0:
            logprobs = TokenLogprobs(
                self._front.tokenizer,
                num_top=params.logprobs,
                each=response.return_log_probs,
                total=response.return_cumulative_logprob,
            )
        text = TextStream(
            self._front.tokenizer,
            params.stop,
            params.skip_special_tokens,
            min_tokens=request.min_tokens,
            include_stop=params.include_stop_str_in_output,
        )
        return Stream(
            text,
            request.num_prompt_tokens,
            streaming=response.stream,
            has_stop=bool(params.stop),
            include_stop=params.include_stop_str_in_output,
            return_token_ids=response.return_token_ids,
            logprobs=logprobs,
            prefix=prefix,
            sequence_index=index,
        )

    def _wants_logprobs(self, asked: ParsedRequest) -> bool:
        response = asked.response
        return response.return_log_probs or response.return_cumulative_logprob

    def _prompt_text(self, asked: ParsedRequest, request: EngineRequest) -> str:
        """The prompt as the client wrote it, or as its ids read."""
        if asked.text is not None:
            return asked.text
        ids: np.ndarray = request.prompt_array()
        return self._front.tokenizer.decode(ids.tolist(), skip_special_tokens=asked.params.skip_special_tokens)


def _check_has_room(n: int, room: Room) -> None:
    most = room.running + room.waiting
    if n > most:
        raise InvalidArgument("n", f"at most {most}, which is max_running_requests and {room.bound} together", n)
