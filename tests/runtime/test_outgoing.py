"""A report's way out: one message for each client that has rows in it."""

import numpy as np
import pytest

from mstar.conductor.report import Outbox, StepReport, named
from mstar.conductor.request import LOGPROB, FinishReason
from mstar.runtime.outgoing import by_client

RUNNING, STOP, LENGTH = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH


def report_of(*chunks: list[tuple[int, int, int, FinishReason]]) -> StepReport:
    """Steps of (client, ticket, token, finish) rows."""
    outbox = Outbox()
    for chunk in chunks:
        clients, tickets, tokens, finish = (np.array(column, np.int64) for column in zip(*chunk, strict=True))
        outbox.add_step(named(tickets, clients, tickets), tokens.astype(np.int32), finish.astype(np.uint8))
    return outbox.take()


ONE = [(3, 70, 5, RUNNING), (3, 71, 6, STOP)]
TWO = [(3, 70, 5, LENGTH), (4, 80, 6, RUNNING), (3, 71, 7, RUNNING)]


@pytest.mark.parametrize(
    ("chunks", "only_client", "messages"),
    [
        ([], None, []),
        ([ONE], 3, [(3, [71], [70, 71], [5, 6])]),
        ([TWO], None, [(3, [70], [70, 71], [5, 7]), (4, [], [80], [6])]),
        ([ONE, [(3, 72, 8, RUNNING)]], 3, [(3, [71], [70, 71, 72], [5, 6, 8])]),
        ([ONE, [(4, 80, 8, LENGTH)]], None, [(3, [71], [70, 71], [5, 6]), (4, [80], [80], [8])]),
        ([ONE, TWO], None, [(3, [71, 70], [70, 71, 70, 71], [5, 6, 5, 7]), (4, [], [80], [6])]),
    ],
)
def test_every_client_gets_its_rows_in_order_and_is_told_who_ended(chunks, only_client, messages):
    report = report_of(*chunks)
    assert report.only_client == only_client
    sent = []
    for client, ended, message in by_client(report):
        tickets, tokens, finish, *_ = message.rows()
        assert ended == tickets[finish != RUNNING].tolist()
        sent.append((client, ended, tickets.tolist(), tokens.tolist()))
    assert sent == messages


def test_records_go_to_the_client_whose_rows_they_are_of():
    outbox = Outbox()
    for chunk, rows in ((ONE, [1]), (TWO, [0, 1])):
        clients, tickets, tokens, finish = (np.array(column, np.int64) for column in zip(*chunk, strict=True))
        records = np.zeros(len(rows), LOGPROB)
        records["rank"] = tickets[rows]
        outbox.add_logprobs(np.array(rows), records)
        outbox.add_step(named(tickets, clients, tickets), tokens.astype(np.int32), finish.astype(np.uint8))
    sent = {}
    for out in by_client(outbox.take()):
        rows = out.message.rows()
        assert rows.logprobs["rank"].tolist() == rows.tickets[rows.logprob_rows].tolist()
        sent[out.client] = rows.logprob_rows.tolist()
    assert sent == {3: [1, 2], 4: [0]}


def test_a_client_without_records_is_sent_none():
    outbox = Outbox()
    records = np.zeros(1, LOGPROB)
    outbox.add_logprobs(np.array([0]), records)
    clients = np.array([3, 4])
    outbox.add_step(named(clients, clients, clients), clients.astype(np.int32), np.zeros(2, np.uint8))
    _, other = by_client(outbox.take())
    assert (other.client, other.message.logprob_rows, other.message.logprobs) == (4, b"", b"")


def test_a_request_that_ended_outside_a_step_goes_out_with_the_steps_rows():
    outbox = Outbox()
    outbox.add_end(9, 4, 80, FinishReason.CANCELLED)
    assert [(out.client, out.ended) for out in by_client(outbox.take())] == [(4, [80])]


def test_a_report_that_does_not_say_whose_it_is_is_looked_through():
    rows = np.array([1, 1])
    report = StepReport(rows, np.array([5, 5]), np.array([1, 2]), rows.astype(np.int32), np.zeros(2, np.uint8))
    assert [(out.client, out.message.rows().tickets.tolist()) for out in by_client(report)] == [(5, [1, 2])]
