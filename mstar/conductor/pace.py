"""How many prompt tokens a step may take beside rows that generate, for these to get their next token in time."""

from __future__ import annotations

FIRST_TOKENS = 64  # before any step with a prompt was timed
LEAST_TOKENS = 16  # a prompt goes on at this rate at least, whatever the target
GROWTH = 2  # of the largest step that was timed
WEIGHT = 0.2  # of the newest step in the averages


class Pace:
    """Learns from steps as they land: a step takes ``base`` and so much more per prompt token."""

    def __init__(self, target_ns: int) -> None:
        """``target_ns``: how long a step with rows that generate should take at most."""
        self._target_ns = target_ns
        self._base_ns: float | None = None
        self._more_ns: float | None = None  # that steps with prompts took beyond the base, and their prompt tokens:
        self._tokens: float | None = None  # averaged apart, so that short prompts say little
        self._largest = FIRST_TOKENS // GROWTH  # step with prompts so far

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the next step beside rows that generate; never many more than there were in a step before,
        which was timed."""
        most = GROWTH * self._largest
        if self._more_ns is None or self._tokens is None:
            return most
        ns_per_token = max(self._more_ns / self._tokens, 1.0)
        return min(max(LEAST_TOKENS, int((self._target_ns - (self._base_ns or 0.0)) / ns_per_token)), most)

    def landed(self, took_ns: int, prompt_tokens: int) -> None:
        """A step with so many prompt tokens landed."""
        if not prompt_tokens:
            self._base_ns = _averaged(self._base_ns, took_ns)
        else:
            self._more_ns = _averaged(self._more_ns, max(took_ns - (self._base_ns or 0.0), 0.0))
            self._tokens = _averaged(self._tokens, prompt_tokens)
            self._largest = max(self._largest, prompt_tokens)


def _averaged(average: float | None, value: float) -> float:
    return value if average is None else average + WEIGHT * (value - average)
