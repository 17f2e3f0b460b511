"""Who sends the requests of a trace to a real engine: prompts with its own answers in them, and who has read enough."""

from __future__ import annotations

import numpy as np

from mstar.conductor.report import StepReport
from mstar.conductor.request import EngineRequest, FinishReason
from mstar.simulate.tokens import stream_tokens
from mstar.simulate.trace import Trace


class Clients:
    """All clients of one trace, played once.

    Each stream of the trace is an array of token ids: made up at first, and written over with what the engine answers,
    so that a session's next prompt holds what was really said.
    """

    def __init__(self, trace: Trace, vocab_size: int, salt: str) -> None:
        """``salt`` keeps the prompts' cached prefixes apart from those of other runs."""
        self._trace = trace
        self._salt = salt
        names, stream_of = np.unique(trace.streams, return_inverse=True)
        lengths = np.zeros(names.size, np.int64)
        np.maximum.at(lengths, stream_of, trace.prompt_tokens + trace.output_tokens)
        starts = np.cumsum(lengths) - lengths
        made_up = stream_tokens(names.repeat(lengths), np.arange(lengths.sum()) - starts.repeat(lengths))
        for first in _firsts(stream_of, trace.system_tokens):
            shared = trace.system(first)
            made_up[starts[stream_of[first]] :][: shared.size] = shared
        self._words = (1 + (made_up - 1) % (vocab_size - 1)).astype("<i4")
        self._prompt_at = starts[stream_of]
        self._answer_at = self._prompt_at + trace.prompt_tokens
        self._heard = np.zeros(len(trace), np.int64)
        self._stops_early = bool((trace.output_tokens < trace.max_tokens).any())

    def request(self, ticket: int) -> EngineRequest:
        """What is asked for under a ticket, in the words said so far."""
        trace = self._trace
        return EngineRequest(
            prompt_ids=self._words[self._prompt_at[ticket] : self._answer_at[ticket]].tobytes(),
            max_tokens=int(trace.max_tokens[ticket]),
            temperature=0.0,
            ignore_eos=True,
            request_priority=int(trace.priorities[ticket]),
            tenant=trace.tenant_names[trace.tenants[ticket]],
            cache_salt=self._salt,
        )

    def hear(self, report: StepReport) -> list[int]:
        """Takes the tokens in; returns the tickets that run on although their answer is as long as the trace says."""
        brings = report.tokens >= 0
        tickets = report.tickets[brings]
        heard = self._heard[tickets]
        self._words[self._answer_at[tickets] + heard] = report.tokens[brings]
        self._heard[tickets] = heard + 1
        if not self._stops_early:
            return []
        runs = report.finish[brings] == FinishReason.RUNNING
        stops: list[int] = tickets[runs & (heard + 1 == self._trace.output_tokens[tickets])].tolist()
        return stops

    def heard(self, ticket: int) -> int:
        """Tokens of an answer so far."""
        return int(self._heard[ticket])


def _firsts(stream_of: np.ndarray, system_tokens: np.ndarray) -> list[int]:
    """The first ticket of each stream that begins with something shared."""
    _, firsts = np.unique(stream_of, return_index=True)
    tickets: list[int] = firsts[system_tokens[firsts] > 0].tolist()
    return tickets
