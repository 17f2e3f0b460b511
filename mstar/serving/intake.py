"""A request's way in: read, checked, tokenised, and opened at the front end. Knows no Triton."""

from __future__ import annotations

import numpy as np

from mstar.model.front import ModelFront
from mstar.runtime.messages import EngineRequest
from mstar.runtime.options import FrontOptions
from mstar.runtime.prepare import prepare_request
from mstar.serving.frontend import Frontend
from mstar.serving.parse import ParsedRequest, RawRequest, parse
from mstar.serving.responses import Reply, Stream
from mstar.text.stream import TextStream


class Intake:
    """Turns raw requests into open ones; one for all of a stub's requests."""

    def __init__(
        self, front: ModelFront, options: FrontOptions, frontend: Frontend, context_length: int | None = None
    ) -> None:
        """``context_length``: the engine's limit in tokens where it is lower than the model's."""
        self._front = front
        self._options = options
        self._frontend = frontend
        self._context_length = context_length

    def take(self, raw: RawRequest, reply: Reply) -> None:
        """Open the request: its responses go to ``reply`` from now on.

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
        )
        params = asked.params
        stream = Stream(
            reply,
            TextStream(self._front.tokenizer, params.stop, params.skip_special_tokens),
            request.num_prompt_tokens,
            streaming=asked.stream,
            has_stop=bool(params.stop),
            return_token_ids=asked.return_token_ids,
            prefix=self._prompt_text(asked, request) if asked.include_prompt else "",
            request_id=raw.request_id,
        )
        self._frontend.open(stream, request)

    def _prompt_text(self, asked: ParsedRequest, request: EngineRequest) -> str:
        """The prompt as the client wrote it, or as its ids read."""
        if asked.text is not None:
            return asked.text
        ids: np.ndarray = request.prompt_array()
        return self._front.tokenizer.decode(ids.tolist(), skip_special_tokens=asked.params.skip_special_tokens)
