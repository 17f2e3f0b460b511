"""From a request to what each resource of a model must know of it."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import TypeVar

import numpy as np

from mstar.conductor import parameters
from mstar.conductor.request import EngineRequest, LogitEdits
from mstar.engine.inputs import RequestInfo
from mstar.engine.resources.grammar.config import GrammarReqConfig, GrammarSpec
from mstar.engine.resources.kv.config import KVReqConfig, PagedKVSpec
from mstar.engine.resources.logit_edits.config import LogitEditsReqConfig, LogitEditsSpec
from mstar.engine.resources.logprobs.config import LogprobsReqConfig, LogprobsSpec
from mstar.engine.resources.sampler.config import SamplerSpec, SamplingReqConfig
from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig

_Spec = TypeVar("_Spec", bound=NodeResourceSpec)
_NO_EDITS = LogitEdits()


class RequestConfigs:
    """Builds a request's engine-side description, and refuses what no resource of the model could honour.

    A request without a seed takes a random number of this process plus its id for one.
    """

    def __init__(self, specs: Sequence[NodeResourceSpec], vocab_size: int, eos_ids: Collection[int]) -> None:
        self._samplers = _of(specs, SamplerSpec)
        self._caches = _of(specs, PagedKVSpec)
        self._editors = _of(specs, LogitEditsSpec)
        self._grammars = _of(specs, GrammarSpec)
        self._observers = _of(specs, LogprobsSpec)
        self._max_tops = [spec.max_top for spec in self._observers]
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._salt = secrets.randbits(63)

    def describe(self, request_id: int, request: EngineRequest, limit: int) -> RequestInfo:
        """What the engine gets of a request that may generate ``limit`` tokens.

        Raises:
            InvalidArgument: a parameter is outside its range or the vocabulary, or nothing in the model honours it;
                names the request's field.
        """
        if request.stop_ids:
            parameters.check_stop_ids(request.stop_ids, self._vocab_size)
        prompt_ids = request.prompt_array().astype(np.int64)
        configs: dict[str, ResourceReqConfig] = {}
        self._add_sampling(configs, request_id, request)
        self._add_edits(configs, request)
        self._add_grammar(configs, request)
        self._add_logprobs(configs, request, limit, prompt_ids)
        for cache in self._caches:
            configs[cache.resource_key] = KVReqConfig(
                prompt_tokens=prompt_ids.size,
                max_tokens=limit,
                prompt_ids=prompt_ids,
                prefix_salt=_prefix_salt(request),
                use_prefix_cache=not request.no_cache and request.num_prompt_logprobs < 0,  # cached: no logits
            )
        return RequestInfo(request_id=request_id, prompt_ids=prompt_ids, max_tokens=limit, resource_configs=configs)

    def _add_sampling(self, configs: dict[str, ResourceReqConfig], request_id: int, request: EngineRequest) -> None:
        if not self._samplers:
            parameters.check_unsampled(request)
            return
        seed = self._salt + request_id if request.seed is None else request.seed  # both are hashed below
        # Of the ids that a sampler bars, the end-of-sequence ids, none ends a request that ignores them; where it has
        # stop ids of its own, both are barred as one set: see _add_edits.
        has_own_floor = request.ignore_eos or not self._eos_ids or request.stop_ids
        min_tokens = 0 if has_own_floor else request.min_tokens
        for spec in self._samplers:
            config = SamplingReqConfig(
                temperature=request.temperature,
                top_k=request.top_k,
                top_p=request.top_p,
                ignore_eos=request.ignore_eos,
                repetition_penalty=request.repetition_penalty,
                min_p=request.min_p,
                repetition_window=request.repetition_window,
                min_tokens=min_tokens,
                top_p_first=request.top_p_first,
                top_p_min_keep=request.top_p_min_keep,
                penalize_prompt=request.penalize_prompt,
            )
            parameters.check_sampling(config, spec)
            config.apply_conductor_config(seed=seed, resource_key=spec.resource_key)
            configs[spec.resource_key] = config

    def _add_edits(self, configs: dict[str, ResourceReqConfig], request: EngineRequest) -> None:
        edits = request.edits or _NO_EDITS
        min_tokens = request.min_tokens if request.stop_ids else 0
        if request.edits is None and not min_tokens:
            return
        allowed_ids = parameters.checked_edits(edits, self._vocab_size)
        if not self._editors:
            parameters.check_unedited(edits, min_tokens)
            return
        config = LogitEditsReqConfig(
            allowed_ids=allowed_ids,
            bad_words=edits.bad_words,
            stop_ids=np.array(self._ends_of(request) if min_tokens else (), np.int64),
            min_tokens=min_tokens,
            bias_ids=np.array([token_id for token_id, _ in edits.bias], np.int64),
            bias=np.array([value for _, value in edits.bias], np.float32),
            presence_penalty=edits.presence_penalty,
            frequency_penalty=edits.frequency_penalty,
        )
        configs.update((spec.resource_key, config) for spec in self._editors)

    def _ends_of(self, request: EngineRequest) -> tuple[int, ...]:
        """The ids that end the request."""
        return request.stop_ids if request.ignore_eos else (*request.stop_ids, *self._eos_ids)

    def _add_grammar(self, configs: dict[str, ResourceReqConfig], request: EngineRequest) -> None:
        guide = request.guide
        if guide is None:
            return
        if not self._grammars:
            raise parameters.unsupported("guided_decoding_guide_type", "none", guide.kind)
        config = GrammarReqConfig(
            kind=guide.kind, text=guide.text, stop_ids=request.stop_ids, ignore_eos=request.ignore_eos
        )
        configs.update((spec.resource_key, config) for spec in self._grammars)

    def _add_logprobs(
        self, configs: dict[str, ResourceReqConfig], request: EngineRequest, limit: int, prompt_ids: np.ndarray
    ) -> None:
        if request.num_logprobs == request.num_prompt_logprobs == -1:
            return
        asks_prompt = request.num_prompt_logprobs >= 0
        parameters.check_logprobs(request, limit, self._max_tops)
        config = LogprobsReqConfig(
            num_top=request.num_logprobs,
            num_prompt_top=request.num_prompt_logprobs,
            prompt_ids=prompt_ids if asks_prompt else None,
        )
        configs.update((spec.resource_key, config) for spec in self._observers)


def _prefix_salt(request: EngineRequest) -> str:
    """Equal only for equal tenant and cache_salt: the tenant stands behind its length."""
    if not (request.tenant or request.cache_salt):
        return ""
    return f"{len(request.tenant)}:{request.tenant}{request.cache_salt}"


def _of(specs: Sequence[NodeResourceSpec], kind: type[_Spec]) -> list[_Spec]:
    return [spec for spec in specs if isinstance(spec, kind)]
