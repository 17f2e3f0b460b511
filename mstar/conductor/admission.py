"""What a request must be for the engine ever to run it."""

from __future__ import annotations

import numpy as np

from mstar.conductor.pools import Pools
from mstar.conductor.queue import Limits
from mstar.conductor.request import MAX_PRIORITY, EngineRequest
from mstar.utils.errors import InvalidArgument


class Admission:
    """Checks a request against the engine's limits before it is queued, so that nothing in it can break a step."""

    def __init__(self, limits: Limits, pools: Pools) -> None:
        self._limits = limits
        self._pools = pools

    def limit_of(self, request: EngineRequest) -> int:
        """Most tokens the request may generate: its own bound, cut to the context; without one, what fits.

        Raises:
            InvalidArgument: the prompt is empty, too long or outside the vocabulary, prompt and output exceed the whole
                KV cache, or the priority is out of range.
        """
        if not -MAX_PRIORITY <= request.request_priority <= MAX_PRIORITY:
            allowed = f"an integer >= -{MAX_PRIORITY} and <= {MAX_PRIORITY}"
            raise InvalidArgument("request_priority", allowed, request.request_priority)
        ids, context = request.prompt_array(), self._limits.max_seq_len
        if ids.size == 0:
            raise InvalidArgument("prompt", "at least one token", "none")
        if ids.size >= context:
            raise InvalidArgument("prompt", f"at most {context - 1} tokens (context limit {context})", ids.size)
        if int(np.maximum.reduce(ids.view(np.uint32))) >= self._limits.vocab_size:  # negative ones are largest
            low, high = int(ids.min()), int(ids.max())
            raise InvalidArgument("prompt", f"token ids in [0, {self._limits.vocab_size})", low if low < 0 else high)
        room = context - ids.size
        if request.max_tokens is not None:
            limit = min(max(request.max_tokens, 0), room)
        else:
            capacity = self._pools.capacity_tokens
            limit = room if capacity is None else max(min(room, capacity - ids.size), 1)
        self._pools.check_can_ever_fit(ids.size, limit)
        return limit
