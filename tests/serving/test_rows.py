"""Rows of many tickets and steps, picked and grouped."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from serving_fakes import records

from mstar.runtime.messages import TokenRows
from mstar.serving.rows import group_by_ticket, pick


def rows(tickets, tokens, finish, told: dict[int, float] | None = None) -> TokenRows:
    """``told``: log-probabilities by row."""
    made = TokenRows(np.array(tickets), np.array(tokens, np.int32), np.array(finish, np.uint8))
    if told is None:
        return made
    return made._replace(logprob_rows=np.array(list(told), np.int64), logprobs=records(list(told.values())))


def test_rows_are_grouped_by_ticket_in_order():
    groups = list(group_by_ticket([rows([7, 3], [1, 2], [0, 0]), rows([3, 7, 5], [4, 3, 9], [0, 2, 0])]))
    assert [(group.ticket, group.tokens.tolist(), group.finish) for group in groups] == [
        (3, [2, 4], 0),
        (5, [9], 0),
        (7, [1, 3], 2),
    ]
    assert all(group.logprobs is None for group in groups)
    assert list(group_by_ticket([])) == []


def test_only_tickets_that_were_told_of_have_records():
    parts = [rows([7, 3], [1, 2], [0, 0], {0: -1.0}), rows([3, 7], [4, -1], [0, 1], {0: -4.0}), rows([9], [5], [0])]
    three, seven, nine = group_by_ticket(parts)
    assert three.logprobs["logprob"].tolist() == [0.0, -4.0]
    assert seven.logprobs["logprob"].tolist() == [-1.0, 0.0]
    assert nine.logprobs is None


def test_picking_keeps_each_record_at_its_row():
    picked = pick(rows([1, 2, 3, 4], [10, 20, 30, 40], [0] * 4, {1: -2.0, 3: -4.0}), np.array([3, 0, 1]))
    assert picked.tokens.tolist() == [40, 10, 20]
    assert picked.logprob_rows.tolist() == [0, 2]
    assert picked.logprobs["logprob"].tolist() == [-4.0, -2.0]
    assert pick(rows([1, 2], [10, 20], [0, 0], {1: -2.0}), np.array([0])).logprobs is None


@given(st.lists(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=6), max_size=5))
def test_every_record_follows_its_token_whatever_the_steps(steps):
    parts, number = [], 0
    for step in steps:
        tokens = list(range(number, number + len(step)))
        told = {row: -float(tokens[row]) for row, (_, is_told) in enumerate(step) if is_told}
        parts.append(rows([ticket for ticket, _ in step], tokens, [0] * len(step), told or None))
        number += len(step)
    told_of = {ticket for step in steps for ticket, is_told in step if is_told}
    seen = []
    for group in group_by_ticket(parts):
        assert group.tokens.tolist() == sorted(group.tokens.tolist())
        seen += group.tokens.tolist()
        assert (group.logprobs is not None) == (group.ticket in told_of)
        if group.logprobs is not None:
            for token, about in zip(group.tokens.tolist(), group.logprobs, strict=True):
                assert about["rank"] == 0 or about["logprob"] == -token
    assert sorted(seen) == list(range(number))
