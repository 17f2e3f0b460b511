"""What steps take, learnt as they land."""

from __future__ import annotations

WEIGHT = 0.2  # of the newest step in the averages


class StepTimes:
    """A step takes ``base_ns`` and so much more for each prompt token; None before any such step."""

    def __init__(self) -> None:
        self.base_ns: float | None = None
        self._more_ns: float | None = None  # that steps with prompts took beyond the base, and their prompt tokens:
        self._tokens: float | None = None  # averaged apart, so that short prompts say little

    @property
    def prompt_token_ns(self) -> float | None:
        return None if self._more_ns is None or self._tokens is None else self._more_ns / self._tokens

    def landed(self, took_ns: int, prompt_tokens: int) -> None:
        """A step with so many prompt tokens landed."""
        if not prompt_tokens:
            self.base_ns = averaged(self.base_ns, took_ns)
        else:
            self._more_ns = averaged(self._more_ns, max(took_ns - (self.base_ns or 0.0), 0.0))
            self._tokens = averaged(self._tokens, prompt_tokens)


def averaged(average: float | None, value: float) -> float:
    """The average with one more value, the first of all when there is none yet."""
    return value if average is None else average + WEIGHT * (value - average)
