"""How many prompt tokens a step may take beside rows that generate, for these to get their next token in time."""

from __future__ import annotations

from mstar.conductor.step_times import StepTimes

FIRST_TOKENS = 64  # before any step with a prompt was timed
LEAST_TOKENS = 16  # a prompt goes on at this rate at least, whatever the target
GROWTH = 2  # of the largest step that was timed


class Pace:
    """Learns from steps as they land, and tells what the next one may take."""

    def __init__(self, target_ns: int, times: StepTimes) -> None:
        """``target_ns``: how long a step with rows that generate should take at most."""
        self._target_ns = target_ns
        self._times = times
        self._largest = FIRST_TOKENS // GROWTH  # step with prompts so far

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the next step beside rows that generate; never many more than there were in a step before,
        which was timed."""
        most = GROWTH * self._largest
        token_ns = self._times.prompt_token_ns
        if token_ns is None:
            return most
        left_ns = self._target_ns - (self._times.base_ns or 0.0)
        return min(max(LEAST_TOKENS, int(left_ns / max(token_ns, 1.0))), most)

    def landed(self, took_ns: int, prompt_tokens: int) -> None:
        """A step with so many prompt tokens landed."""
        self._times.landed(took_ns, prompt_tokens)
        self._largest = max(self._largest, prompt_tokens)
