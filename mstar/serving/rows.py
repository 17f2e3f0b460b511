"""Rows of tokens, one by one and grouped by what they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from types import NoneType
from typing import NamedTuple, TypeAlias

import numpy as np

from mstar.conductor.request import LOGPROB
from mstar.runtime.messages import TokenRows

# Ticket, token, finish, and a LOGPROB record [1] where one was told.  Plain tuples: there is one per token, and making
# one costs a tenth of anything with a name.
Row: TypeAlias = tuple[int, int, int, np.ndarray | None]


class TicketRows(NamedTuple):
    """One ticket's rows in order: tokens [n], the last row's finish, and LOGPROB [n] where one was told.

    A row without a record, such as one that ends without output, has an empty one.
    """

    ticket: int
    tokens: Sequence[int]
    finish: int
    logprobs: np.ndarray | None = None


def rows_of(rows: TokenRows) -> Iterator[Row]:
    """A step's rows in order."""
    return zip(rows.tickets.tolist(), rows.tokens.tolist(), rows.finish.tolist(), _records_of(rows), strict=False)


def group_by_ticket(rows: Sequence[Row]) -> Iterator[TicketRows]:
    """One per ticket in ``rows``, which are in order of time."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        ticket = row[0]
        if ticket in groups:
            groups[ticket].append(row)
        else:
            groups[ticket] = [row]
    for ticket, mine in groups.items():
        _, tokens, finishes, records = zip(*mine, strict=True)
        yield TicketRows(ticket, tokens, finishes[-1], _joined(records))


def _records_of(rows: TokenRows) -> Iterator[np.ndarray | None]:
    """One per row."""
    if rows.logprob_rows is None or rows.logprobs is None:
        return repeat(None)
    records: list[np.ndarray | None] = [None] * rows.tickets.size
    for index, row in enumerate(rows.logprob_rows.tolist()):
        records[row] = rows.logprobs[index : index + 1]
    return iter(records)


def _joined(records: Sequence[np.ndarray | None]) -> np.ndarray | None:
    if set(map(type, records)) == {NoneType}:
        return None
    empty = np.zeros(1, LOGPROB)
    return np.concatenate([empty if record is None else record for record in records])
