"""By which way a request that gives its pages up comes back at the least cost."""

from __future__ import annotations

from mstar.conductor.step_times import StepTimes, averaged

OFFLOAD, RECOMPUTE, AUTO = WAYS = "offload", "recompute", "auto"
FORGETTING = 0.98  # of what moving took, each time it is not chosen: so it is tried again some day


class WayBack:
    """Whether pages wait on the host, or their tokens are run again.

    ``auto`` takes what costs the engine less for a token: moving it there and back, as measured each time, or running
    it as part of a prompt, as learnt from the steps.  Before both are known pages are moved.
    """

    def __init__(self, way: str, times: StepTimes) -> None:
        self._way = way
        self._times = times
        self._out_ns: float | None = None  # of a token
        self._back_ns: float | None = None

    def is_host(self) -> bool:
        """For the next one to go."""
        again_ns = self._times.prompt_token_ns
        if self._way != AUTO or again_ns is None or self._out_ns is None:
            return self._way != RECOMPUTE
        back_ns = self._out_ns if self._back_ns is None else self._back_ns
        if self._out_ns + back_ns <= again_ns:
            return True
        self._out_ns *= FORGETTING
        self._back_ns = back_ns * FORGETTING
        return False

    def moved(self, num_tokens: int, took_ns: int, is_back: bool) -> None:
        """Pages of so many tokens were moved, to the host or ``is_back``."""
        token_ns = took_ns / max(num_tokens, 1)
        if is_back:
            self._back_ns = averaged(self._back_ns, token_ns)
        else:
            self._out_ns = averaged(self._out_ns, token_ns)
