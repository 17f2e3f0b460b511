"""What an engine decides about a model when it loads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelLoadOptions:
    """Limits and memory of one engine.

    ``max_seq_len`` (tokens, prompt plus output) None takes the model's own, which it cannot exceed.
    ``kv_memory_bytes`` None takes what ``max_running_requests`` need at that length, capped by the machine's memory.
    ``kv_host_memory_bytes`` hold pages of requests that wait for others; with ``reserves_pages`` none has to, for what
    a request may come to need must be free as it joins.  ``page_size`` is in tokens.  ``kv_dtype`` None follows the
    weights.  ``max_batch_tokens`` is the most prompt tokens of a step that is not one long prompt alone.
    ``capture_batch_sizes`` empty takes the device's ladder.
    ``keep_blocks`` keeps quantised weights in their blocks where the device computes from them with the same result.
    ``load_format`` dummy makes random weights in the config's shapes instead of reading any.
    ``prefix_cache`` keeps pages of finished requests for prompts that begin alike.  ``deterministic`` fixes every
    reduction's order, whatever else is in the batch.
    """

    max_seq_len: int | None = None
    kv_memory_bytes: int | None = None
    kv_host_memory_bytes: int = 0
    reserves_pages: bool = True
    kv_dtype: torch.dtype | None = None
    page_size: int = 16
    max_running_requests: int = 64
    max_batch_tokens: int = 2048
    capture_batch_sizes: tuple[int, ...] = ()
    keep_blocks: bool = True
    load_format: str = "auto"
    prefix_cache: bool = True
    deterministic: bool = False
