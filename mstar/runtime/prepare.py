"""From a prompt and its parameters to a request the engine can run: every check that concerns the request alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from mstar.conductor.request import Guide
from mstar.engine.resources.sampler.config import derive_seed
from mstar.runtime.edits import check_in_vocabulary, logit_edits_of
from mstar.runtime.messages import EngineRequest
from mstar.runtime.options import FrontOptions
from mstar.runtime.params import GREEDY_BELOW, SMALLEST_TOP_P, SamplingParams
from mstar.runtime.prompts import prompt_ids, refuse_surrogates
from mstar.utils.errors import InvalidArgument

if TYPE_CHECKING:
    from mstar.model.front import ModelFront

FALLBACK_TEMPERATURE = 0.6  # the sampler config's own default
PENALTY_RANGE = (1e-20, 1e20)  # beyond it a float32 logit overflows, and a larger penalty would change no order


def prepare_request(
    front: ModelFront,
    *,
    text: str | None = None,
    input_ids: Any = None,
    messages: Sequence[Mapping[str, Any]] | str | None = None,
    params: SamplingParams,
    front_options: FrontOptions,
    context_length: int | None = None,
    arrival_ns: int | None = None,
) -> EngineRequest:
    """Tokenises the one prompt that is given, checks it against its parameters, and fills in every default.

    A parameter is the request's own, else the option's, else the model's.  A default never makes a request fail that
    did not ask for it.  The request is that of the first of ``params.n`` texts: see :func:`sequences_of`.

    Args:
        text: a prompt; special tokens in it are recognised.
        input_ids: a prompt as token ids, any 1-D array or sequence of integers.
        messages: a chat, as a list of objects or its JSON; rendered by the model's template.
        context_length: the engine's limit where it is lower than the model's.
        arrival_ns: when the request came, on the monotonic clock; now if it is not given.

    Raises:
        InvalidArgument: names ``text_input``, ``input_ids``, ``messages`` or a parameter, what is allowed, and what was
            given.
        Unsupported: ``messages`` for a model without a chat template.
    """
    arrival_ns = time.monotonic_ns() if arrival_ns is None else arrival_ns
    own, options = front.generation, front_options
    check_in_vocabulary("stop_token_ids", params.stop_token_ids, front.vocab_size)
    _check_n(params, options)
    min_tokens, max_tokens = _budget(front, params, options)
    for stop in params.stop:
        refuse_surrogates("stop", stop)  # no text holds one
    refuse_surrogates("tenant", params.tenant)
    refuse_surrogates("cache_salt", params.cache_salt)
    edits = logit_edits_of(front, params)
    context = front.context_length if context_length is None else min(context_length, front.context_length)
    ids = prompt_ids(front, text, input_ids, messages, context)
    room = context - int(ids.size)
    temperature = _first(params.temperature, options.default_temperature, own.get("temperature"), FALLBACK_TEMPERATURE)
    penalty = _first(params.repetition_penalty, options.default_repetition_penalty, own.get("repetition_penalty"), 1.0)
    guide = params.guided_decoding_guide_type
    return EngineRequest(
        prompt_ids=ids.astype("<i4", copy=False).tobytes(),
        max_tokens=None if max_tokens is None else min(max_tokens, room),
        min_tokens=min(min_tokens, room),
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=_top_k(_first(params.top_k, options.default_top_k, own.get("top_k"), 0), front.vocab_size),
        top_p=max(_first(params.top_p, options.default_top_p, own.get("top_p"), 1.0), SMALLEST_TOP_P),
        min_p=_first(params.min_p, options.default_min_p, own.get("min_p"), 0.0),
        repetition_penalty=min(max(penalty, PENALTY_RANGE[0]), PENALTY_RANGE[1]),
        repetition_window=params.repetition_window,
        penalize_prompt=params.penalize_prompt,
        top_p_first=params.top_p_first,
        top_p_min_keep=params.top_p_min_keep,
        seed=params.seed,
        ignore_eos=params.ignore_eos,
        stop_ids=params.stop_token_ids,
        edits=edits,
        guide=None if guide is None else Guide(guide, params.guided_decoding_guide or ""),
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        num_prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        deadline_ns=arrival_ns + params.timeout_ms * 1_000_000 if params.timeout_ms else 0,
        request_priority=params.request_priority,
        tenant=params.tenant,
        cache_salt=params.cache_salt,
        no_cache=params.no_cache,
    )


def sequences_of(request: EngineRequest, n: int) -> list[EngineRequest]:
    """The requests of ``n`` independent texts for one prompt; the first is ``request`` itself.

    Each has a seed of its own, derived from the request's; without one every text draws differently anyway.  What is
    asked about the prompt's tokens is told with the first alone.
    """
    return [request] + [
        msgspec.structs.replace(
            request,
            seed=None if request.seed is None else derive_seed(request.seed, f"n:{index}"),
            num_prompt_logprobs=-1,
        )
        for index in range(1, n)
    ]


def _check_n(params: SamplingParams, options: FrontOptions) -> None:
    if params.n > options.max_n:
        raise InvalidArgument("n", f"an integer >= 1 and <= {options.max_n}, the option max_n", params.n)
    is_greedy = (params.temperature is not None and params.temperature < GREEDY_BELOW) or params.top_k == 1
    if params.n > 1 and is_greedy:
        raise InvalidArgument("n", "1 where temperature 0 or top_k 1 is greedy: all texts would be equal", params.n)


def _budget(front: ModelFront, params: SamplingParams, options: FrontOptions) -> tuple[int, int | None]:
    """Fewest and most tokens, before both are cut to what the context leaves."""
    low, high = params.min_tokens, _first(params.max_tokens, options.default_max_tokens)
    if low is not None and high is not None and low > high:
        raise InvalidArgument("min_tokens", f"an integer >= 0 and <= {high}, which is max_tokens", low)
    if high is None:
        high = front.generation.get("max_tokens")
    if low is None:
        can_stop = front.eos_ids or params.stop_token_ids
        low = front.generation.get("min_tokens", 0) if can_stop else 0
        return low if high is None else min(low, high), high
    return low, None if high is None else max(low, high)


def _top_k(top_k: int, vocab_size: int) -> int:
    """0 where it would keep every token."""
    return 0 if top_k <= 0 or top_k >= vocab_size else top_k


def _first(*values: Any) -> Any:
    """The first that is set."""
    return next((value for value in values if value is not None), None)
