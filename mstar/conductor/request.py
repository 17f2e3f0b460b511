"""A request as the engine runs it, and how one ends.  Imports neither torch nor kernels: front ends use it too."""

from __future__ import annotations

from enum import IntEnum

import msgspec
import numpy as np

_INT32 = np.dtype("<i4")
NO_TOKEN = -1  # in a row of tokens: the row brings none (an end-of-sequence token is no output)


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


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A request in token ids, checked, every default filled in.

    ``prompt_ids`` is int32 little endian.  ``max_tokens`` None is what context and KV cache leave.  ``top_k`` 0 and
    ``top_p`` 1 are off, ``temperature`` 0 is greedy, ``seed`` None draws differently every time.  ``stop_ids`` end
    it like an end-of-sequence token, also with ``ignore_eos``.
    """

    prompt_ids: bytes
    max_tokens: int | None
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids) // 4

    def prompt_array(self) -> np.ndarray:
        """int32 [prompt tokens], read only."""
        return np.frombuffer(self.prompt_ids, _INT32)
