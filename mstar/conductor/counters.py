"""Totals that a conductor counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from mstar.conductor.request import FinishReason


@dataclass
class Counters:
    """Totals since the start.

    ``cached_prompt_tokens`` of the prompts' tokens were found in a prefix cache.  ``overshoot_tokens`` were made after
    the text's end, before the front end said so; ``discarded_tokens`` came from a step that was already launched when
    their request ended, and nobody saw them.

    ``preemptions``: times that a running request gave its pages up; ``offloads`` of these to the host, else it ran
    ``recomputed_tokens`` again as it came back, less those it found cached.

    Parts of ``failed``: ``row_faults``, whose logits were not finite or whose grammar did not take its own token;
    ``constraint_faults``, whose constraints left no token or exceeded a limit; ``expired``, whose deadline passed
    before they ran.
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    overshoot_tokens: int = 0
    discarded_tokens: int = 0
    row_faults: int = 0
    constraint_faults: int = 0
    expired: int = 0
    failed: int = 0
    refused_admissions: int = 0
    preemptions: int = 0
    offloads: int = 0
    recomputed_tokens: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
