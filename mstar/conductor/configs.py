"""From a request to what each resource of a model must know of it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

from mstar.conductor.queue import Waiting
from mstar.engine.inputs import RequestInfo
from mstar.engine.resources.kv.config import KVReqConfig, PagedKVSpec
from mstar.engine.resources.sampler.config import SamplerSpec, SamplingReqConfig, derive_seed
from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig


class RequestConfigs:
    """Builds a request's engine-side description.

    A request without a seed draws from a random salt of this process, mixed with the request's id.
    """

    def __init__(self, specs: Sequence[NodeResourceSpec]) -> None:
        self._samplers = [spec.resource_key for spec in specs if isinstance(spec, SamplerSpec)]
        self._caches = [spec.resource_key for spec in specs if isinstance(spec, PagedKVSpec)]
        self._salt = secrets.randbits(63)

    def describe(self, waiting: Waiting) -> RequestInfo:
        request = waiting.request
        prompt_ids = request.prompt_array().astype(np.int64)
        seed = request.seed if request.seed is not None else derive_seed(self._salt, f"request:{waiting.request_id}")
        configs: dict[str, ResourceReqConfig] = {}
        for key in self._samplers:
            configs[key] = SamplingReqConfig(
                temperature=request.temperature,
                top_k=request.top_k,
                top_p=request.top_p,
                ignore_eos=request.ignore_eos,
            )
            configs[key].apply_conductor_config(seed=seed, resource_key=key)
        for key in self._caches:
            configs[key] = KVReqConfig(prompt_tokens=prompt_ids.size, max_tokens=waiting.limit, prompt_ids=prompt_ids)
        return RequestInfo(
            request_id=waiting.request_id,
            prompt_ids=prompt_ids,
            max_tokens=waiting.limit,
            resource_configs=configs,
        )
