"""Measures an engine's loop while requests come and go: what the host does in a turn, and how long a turn takes."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import torch

from mstar.conductor.conductor import Conductor
from mstar.conductor.protocols import StepEngine
from mstar.conductor.request import EngineRequest, FinishReason
from mstar.runtime.core import EngineCore
from mstar.runtime.messages import encode
from mstar.runtime.outgoing import by_client
from mstar.simulate.measured import LoopTurn
from mstar.simulate.recording import RecordingEngine

SIZES = (1, 4, 16, 48, 128)  # requests that are in at a time, as far as they may
TURNS = 80  # measured with each
WARM_TURNS = 8  # before them, in which the first prompts are
PROMPT_TOKENS = (16, 256)
OUTPUT_TOKENS = (8, 64)


class LoopSurvey:
    """Runs a loop as an engine process has it, but for sockets: whoever has ended is followed by a new request.

    One step is in the device's queue besides the one that runs, or none where the host computes.
    """

    def __init__(self, core: EngineCore, recorder: RecordingEngine, clock: Callable[[], float], runs_ahead: bool):
        """``recorder`` is around the core's engine; ``clock`` tells seconds."""
        self.submissions: list[float] = []  # seconds that each took
        self._recorder = recorder
        self._clock = clock
        self._runs_ahead = runs_ahead
        limits = dataclasses.replace(core.conductor.limits, run_ahead=runs_ahead, max_steps_ahead=1)
        self._conductor = Conductor(cast(StepEngine, recorder), core.model, limits)
        self._vocab_size = core.model.vocab_size
        self._longest = max(min(PROMPT_TOKENS[1], core.model.max_seq_len - OUTPUT_TOKENS[1]), 1)

    def turns(self, rng: np.random.Generator) -> list[LoopTurn]:
        """Those of all :data:`SIZES`."""
        most = self._conductor.max_running_requests
        sizes = [size for size in SIZES if size < most] + [min(most, SIZES[-1])]
        return [turn for size in sizes for turn in self._with(size, rng)]

    @property
    def request_us(self) -> float:
        """What taking a request in costs, median."""
        return statistics.median(self.submissions) * 1e6

    @torch.inference_mode()  # as the engine's own loop runs
    def _with(self, size: int, rng: np.random.Generator) -> list[LoopTurn]:
        """Turns with so many requests in."""
        recorder, conductor, num_in = self._recorder, self._conductor, 0
        recorder.clear()
        found: list[LoopTurn] = []
        for turn in range(WARM_TURNS + TURNS):
            num_steps, num_landed = len(recorder.uses), len(recorder.landed)
            requests = [*self._requests(size - num_in, rng)]
            start = self._clock()
            for request in requests:
                conductor.submit(request)
            called = self._clock()
            num_in = size - self._step()
            end = self._clock()
            self.submissions += [(called - start) / len(requests)] * len(requests) if requests else []
            launched, landed = recorder.uses[num_steps:], recorder.landed[num_landed:]
            if turn >= WARM_TURNS and len(launched) == len(landed) == 1:
                waited = (recorder.wait_ms if self._runs_ahead else recorder.step_ms)[landed[0]]
                found.append(
                    LoopTurn(
                        recorder.composition(landed[0]),
                        recorder.host_step(num_steps),
                        len(requests),
                        (end - called) * 1e6 - waited * 1e3,
                        (end - start) * 1e3,
                    )
                )
        while conductor.has_work():
            self._step()
        return found

    def _step(self) -> int:
        """One call of the conductor, and the messages that front ends would get; how many requests have ended."""
        report = self._conductor.step()
        for _, _, message in by_client(report):
            encode(message)
        return int(np.count_nonzero(report.finish != FinishReason.RUNNING)) + len(report.failures)

    def _requests(self, count: int, rng: np.random.Generator) -> Iterator[EngineRequest]:
        for _ in range(count):
            length = int(rng.integers(min(PROMPT_TOKENS[0], self._longest), self._longest, endpoint=True))
            prompt = rng.integers(1, self._vocab_size, length).astype("<i4")
            tokens = int(rng.integers(*OUTPUT_TOKENS))
            yield EngineRequest(prompt_ids=prompt.tobytes(), max_tokens=tokens, temperature=0.0, ignore_eos=True)
