"""Picking and grouping rows of tokens by what they belong to, all columns at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mstar.conductor.request import LOGPROB
from mstar.runtime.messages import TokenRows


class TicketRows(NamedTuple):
    """One ticket's rows in order: tokens int32 [n], the last row's finish, and LOGPROB [n] where one was told.

    A row without a record, such as one that ends without output, has an empty one.
    """

    ticket: int
    tokens: np.ndarray
    finish: int
    logprobs: np.ndarray | None = None


def pick(rows: TokenRows, index: np.ndarray) -> TokenRows:
    """The rows at ``index`` int64 [k], in its order."""
    tickets, tokens, finish = rows.tickets[index], rows.tokens[index], rows.finish[index]
    if rows.logprob_rows is None or rows.logprobs is None:
        return TokenRows(tickets, tokens, finish)
    record_of = np.full(rows.tickets.size, -1)
    record_of[rows.logprob_rows] = np.arange(rows.logprob_rows.size)
    record_of = record_of[index]
    told = np.flatnonzero(record_of >= 0)
    if not told.size:
        return TokenRows(tickets, tokens, finish)
    return TokenRows(tickets, tokens, finish, told, rows.logprobs[record_of[told]])


def join(parts: Sequence[TokenRows]) -> TokenRows:
    """Rows of several steps behind each other."""
    if len(parts) == 1:
        return parts[0]
    tickets = np.concatenate([part.tickets for part in parts])
    tokens = np.concatenate([part.tokens for part in parts])
    finish = np.concatenate([part.finish for part in parts])
    if all(part.logprobs is None for part in parts):
        return TokenRows(tickets, tokens, finish)
    starts = np.cumsum([0, *(part.tickets.size for part in parts[:-1])]).tolist()
    told = [
        (part.logprob_rows + start, part.logprobs)
        for part, start in zip(parts, starts, strict=True)
        if part.logprob_rows is not None and part.logprobs is not None
    ]
    where, records = zip(*told, strict=True)
    return TokenRows(tickets, tokens, finish, np.concatenate(where), np.concatenate(records))


def group_by_ticket(parts: Sequence[TokenRows]) -> Iterator[TicketRows]:
    """One per ticket in ``parts``, whose rows are in order of time."""
    if not parts:
        return
    joined = join(parts)
    rows = pick(joined, np.argsort(joined.tickets, kind="stable"))
    edges = np.flatnonzero(np.diff(rows.tickets)) + 1
    starts, ends = [0, *edges.tolist()], [*edges.tolist(), rows.tickets.size]
    if rows.logprob_rows is None or rows.logprobs is None:
        for start, end in zip(starts, ends, strict=True):
            yield TicketRows(int(rows.tickets[start]), rows.tokens[start:end], int(rows.finish[end - 1]))
        return
    firsts, lasts = (np.searchsorted(rows.logprob_rows, at).tolist() for at in (starts, ends))
    for start, end, first, last in zip(starts, ends, firsts, lasts, strict=True):
        records = None
        if last > first:
            records = np.zeros(end - start, LOGPROB)
            records[rows.logprob_rows[first:last] - start] = rows.logprobs[first:last]
        yield TicketRows(int(rows.tickets[start]), rows.tokens[start:end], int(rows.finish[end - 1]), records)
