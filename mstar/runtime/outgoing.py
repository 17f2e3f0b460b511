"""What a step's report becomes on its way out: one message per front end, whatever its number of rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mstar.conductor.report import StepReport
from mstar.conductor.request import FinishReason
from mstar.runtime.messages import StepTokens

_RUNNING = bytes([FinishReason.RUNNING])


class ForClient(NamedTuple):
    """``ended``: tickets whose last row this is."""

    client: int
    ended: list[int]
    message: StepTokens


def by_client(report: StepReport) -> list[ForClient]:
    """The report's rows as one message for each client that has any."""
    if not report.request_ids.size:
        return []
    if report.only_client is not None:
        return [_message(report.only_client, report.tickets, report.tokens, report.finish)]
    messages = []
    for client in np.unique(report.clients).tolist():
        mine = report.clients == client
        messages.append(_message(client, report.tickets[mine], report.tokens[mine], report.finish[mine]))
    return messages


def _message(client: int, tickets: np.ndarray, tokens: np.ndarray, finish: np.ndarray) -> ForClient:
    told = finish.tobytes()
    ended = tickets[finish.nonzero()].tolist() if told.strip(_RUNNING) else []
    return ForClient(client, ended, StepTokens(tickets.tobytes(), tokens.tobytes(), told))
