"""What a step's report becomes on its way out: one message per front end, whatever its number of rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mstar.conductor.report import StepReport
from mstar.conductor.request import FinishReason
from mstar.runtime.messages import StepTokens


class ForClient(NamedTuple):
    """``ended``: tickets whose last row this is."""

    client: int
    ended: list[int]
    message: StepTokens


def by_client(report: StepReport) -> list[ForClient]:
    """The report's rows as one message for each client that has any."""
    if not report.request_ids.size:
        return []
    clients = np.unique(report.clients)
    return [
        _message(report, int(client), slice(None) if clients.size == 1 else report.clients == client)
        for client in clients
    ]


def _message(report: StepReport, client: int, mine: slice | np.ndarray) -> ForClient:
    tickets, finish = report.tickets[mine], report.finish[mine]
    ended = tickets[finish != FinishReason.RUNNING].tolist()
    return ForClient(client, ended, StepTokens(tickets.tobytes(), report.tokens[mine].tobytes(), finish.tobytes()))
