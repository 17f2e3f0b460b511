"""What a step's report becomes on its way out: one message per front end, whatever its number of rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mstar.conductor.report import StepReport
from mstar.conductor.request import FinishReason
from mstar.runtime.messages import StepTokens, TokenRows

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
    rows = TokenRows(report.tickets, report.tokens, report.finish, report.logprob_rows, report.logprobs)
    if report.only_client is not None:
        return [_message(report.only_client, rows)]
    return [_message(client, _chosen(rows, report.clients == client)) for client in np.unique(report.clients).tolist()]


def _chosen(rows: TokenRows, mine: np.ndarray) -> TokenRows:
    """The rows where ``mine`` bool [n] is true."""
    chosen = TokenRows(rows.tickets[mine], rows.tokens[mine], rows.finish[mine])
    if rows.logprob_rows is None or rows.logprobs is None:
        return chosen
    told = mine[rows.logprob_rows]
    new_place = np.cumsum(mine) - 1
    return chosen._replace(logprob_rows=new_place[rows.logprob_rows[told]], logprobs=rows.logprobs[told])


def _message(client: int, rows: TokenRows) -> ForClient:
    tickets, finish = rows.tickets, rows.finish.tobytes()
    ended = tickets[rows.finish.nonzero()].tolist() if finish.strip(_RUNNING) else []
    if rows.logprob_rows is None or rows.logprobs is None or not rows.logprob_rows.size:
        return ForClient(client, ended, StepTokens(tickets.tobytes(), rows.tokens.tobytes(), finish))
    told = rows.logprob_rows.tobytes(), rows.logprobs.tobytes()
    return ForClient(client, ended, StepTokens(tickets.tobytes(), rows.tokens.tobytes(), finish, *told))
