"""Rows of many tickets and steps, one by one and grouped."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from serving_fakes import records

from mstar.runtime.messages import TokenRows
from mstar.serving.rows import Row, TicketRows, group_by_ticket, rows_of


def step(tickets, tokens, finish, told: dict[int, float] | None = None) -> list[Row]:
    """``told``: log-probabilities by row."""
    made = TokenRows(np.array(tickets), np.array(tokens, np.int32), np.array(finish, np.uint8))
    if told is None:
        return list(rows_of(made))
    told_of = {"logprob_rows": np.array(list(told), np.int64), "logprobs": records(list(told.values()))}
    return list(rows_of(made._replace(**told_of)))


def test_a_step_is_its_rows_in_order():
    assert step([7, 3], [1, -1], [0, 2]) == [(7, 1, 0, None), (3, -1, 2, None)]


def test_rows_are_grouped_by_ticket_in_order():
    groups = list(group_by_ticket(step([7, 3], [1, 2], [0, 0]) + step([3, 7, 5], [4, 3, 9], [0, 2, 0])))
    assert groups == [TicketRows(7, (1, 3), 2), TicketRows(3, (2, 4), 0), TicketRows(5, (9,), 0)]
    assert list(group_by_ticket([])) == []


def test_only_tickets_that_were_told_of_have_records():
    rows = step([7, 3], [1, 2], [0, 0], {0: -1.0}) + step([3, 7], [4, -1], [0, 1], {0: -4.0}) + step([9], [5], [0])
    seven, three, nine = group_by_ticket(rows)
    assert three.logprobs["logprob"].tolist() == [0.0, -4.0]
    assert seven.logprobs["logprob"].tolist() == [-1.0, 0.0]
    assert nine.logprobs is None


@given(st.lists(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=6), max_size=5))
def test_every_record_follows_its_token_whatever_the_steps(steps):
    rows, number = [], 0
    for each in steps:
        tokens = list(range(number, number + len(each)))
        told = {row: -float(tokens[row]) for row, (_, is_told) in enumerate(each) if is_told}
        rows += step([ticket for ticket, _ in each], tokens, [0] * len(each), told or None)
        number += len(each)
    told_of = {ticket for each in steps for ticket, is_told in each if is_told}
    seen = []
    for group in group_by_ticket(rows):
        assert list(group.tokens) == sorted(group.tokens)
        seen += group.tokens
        assert (group.logprobs is not None) == (group.ticket in told_of)
        if group.logprobs is not None:
            for token, about in zip(group.tokens, group.logprobs, strict=True):
                assert about["rank"] == 0 or about["logprob"] == -token
    assert sorted(seen) == list(range(number))
