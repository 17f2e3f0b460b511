"""A request as the engine runs it, and how one ends.  Imports neither torch nor kernels: front ends use it too."""

from __future__ import annotations

from enum import IntEnum

import msgspec
import numpy as np

_INT32 = np.dtype("<i4")
NO_TOKEN = -1  # in a row of tokens: the row brings none (an end-of-sequence token is no output)
MAX_LOGPROBS = 20  # most likely tokens that are told of a position
MAX_PRIORITY = 100  # of a request, either way

# What is told of one position: its token's log-probability in the model's own distribution and its rank there (1 is
# the most likely), then as many of the most likely tokens as were asked for, the rest -1 and 0.
LOGPROB = np.dtype(
    [
        ("logprob", "<f4"),
        ("rank", "<i4"),
        ("top_ids", "<i4", (MAX_LOGPROBS,)),
        ("top_logprobs", "<f4", (MAX_LOGPROBS,)),
    ]
)


def stop_code(token_id: int) -> int:
    """What stands in a row of tokens for the stop id that ended the row; :func:`stop_id_of` reads it."""
    return -2 - token_id


def stop_id_of(code: int) -> int | None:
    """The stop id behind a code in a row of tokens; None for a token, and for :data:`NO_TOKEN`."""
    return -2 - code if code <= -2 else None


class FinishReason(IntEnum):
    """How a row stands after a step."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    TIMEOUT = 4

    @property
    def text(self) -> str:
        """The client's word for it."""
        return self.name.lower()


class LogitEdits(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Changes to a request's logits that come before its sampling.

    ``presence_penalty`` is taken off every token generated so far, ``frequency_penalty`` once per time it was.
    ``bias``: (token id, what is added to its logit).  ``bad_words``: sequences of token ids never completed.
    ``allowed_ids``: int32 little endian, the only ids that may be drawn; empty allows all.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_ids: bytes = b""

    @property
    def bars_tokens(self) -> bool:
        return bool(self.bad_words or self.allowed_ids)


class Guide(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that the text must follow: ``kind`` is json (any object), json_schema, regex, ebnf_grammar or choice
    (``text`` is a JSON list of strings)."""

    kind: str
    text: str


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A request in token ids, checked, every default filled in.

    ``prompt_ids`` is int32 little endian.  ``max_tokens`` None is what context and KV cache leave.  ``temperature`` 0
    is greedy, ``seed`` None draws differently every time; the other sampling fields, and their values that are off,
    are those of :class:`~mstar.engine.resources.sampler.config.SamplingReqConfig`.  ``stop_ids`` end it like an
    end-of-sequence token, also with ``ignore_eos``; neither can be drawn before ``min_tokens`` tokens exist.
    ``num_logprobs`` and ``num_prompt_logprobs``: most likely tokens to tell of each generated and each prompt token;
    0 tells of the token itself, -1 of nothing.  ``deadline_ns`` is on the monotonic clock of the machine; 0 is none.
    ``request_priority``, higher is sooner, is at most :data:`MAX_PRIORITY` either way; ``tenant`` is whose share of the
    engine it takes.  Prompts share cached prefixes only under equal ``tenant`` and ``cache_salt``; with ``no_cache``
    it neither reads nor fills the prefix cache.
    """

    prompt_ids: bytes
    max_tokens: int | None
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int = 0
    penalize_prompt: bool = True
    top_p_first: bool = False
    top_p_min_keep: int = 1
    edits: LogitEdits | None = None
    guide: Guide | None = None
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    deadline_ns: int = 0
    request_priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    no_cache: bool = False

    @property
    def bars_tokens(self) -> bool:
        """Whether its parameters may leave it no token at all."""
        return self.guide is not None or (self.edits is not None and self.edits.bars_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids) // 4

    def prompt_array(self) -> np.ndarray:
        """int32 [prompt tokens], read only."""
        return np.frombuffer(self.prompt_ids, _INT32)
