"""Messages survive the wire."""

import numpy as np
import pytest

from mstar.conductor.request import LOGPROB, Guide, LogitEdits
from mstar.runtime import messages as m

REQUEST = m.EngineRequest(prompt_ids=np.arange(5, dtype="<i4").tobytes(), max_tokens=None, temperature=0.5, seed=3)


@pytest.mark.parametrize(
    "message", [m.Hello(1, "a-0"), m.Beat(), m.Bye(), m.Submit(2**62, REQUEST), m.Cancel(1), m.Finish(1, 5)]
)
def test_messages_to_the_engine_come_back_equal(message):
    assert m.decode_to_engine(m.encode(message)) == message


def test_rows_come_back_as_arrays():
    tickets, tokens = np.array([1, 2**40], "<i8"), np.array([7, -1], "<i4")
    finish = np.array([m.FinishReason.RUNNING, m.FinishReason.STOP], np.uint8)
    sent = m.StepTokens(tickets.tobytes(), tokens.tobytes(), finish.tobytes())
    received = m.decode_from_engine(m.encode(sent))
    rows = received.rows()
    for got, expected in zip(rows[:3], (tickets, tokens, finish), strict=True):
        assert np.array_equal(got, expected)
    assert (rows.logprob_rows, rows.logprobs) == (None, None)


def records_of(*ranks: int) -> np.ndarray:
    records = np.zeros(len(ranks), LOGPROB)
    records["rank"], records["logprob"], records["top_ids"] = ranks, -0.5, -1
    return records


def test_records_come_back_as_they_were():
    rows, records = np.array([0, 2]), records_of(3, 4)
    sent = m.StepTokens(bytes(24), bytes(12), bytes(3), rows.tobytes(), records.tobytes())
    received = m.decode_from_engine(m.encode(sent)).rows()
    assert received.logprob_rows.tolist() == [0, 2]
    assert np.array_equal(received.logprobs, records)
    sent = m.PromptTokens(7, records.tobytes())
    received = m.decode_from_engine(m.encode(sent))
    assert received.ticket == 7
    assert np.array_equal(received.records(), records)
    assert m.decode_from_engine(m.encode(m.PromptTokens(7, b""))).records().size == 0


def test_every_field_of_a_request_survives():
    request = m.EngineRequest(
        prompt_ids=bytes(8),
        max_tokens=4,
        temperature=0.0,
        stop_ids=(1, 2),
        edits=LogitEdits(bias=((1, 2.5),), bad_words=((1, 2), (3,)), allowed_ids=bytes(4)),
        guide=Guide("regex", "a+"),
        num_logprobs=3,
        deadline_ns=2**62,
    )
    assert m.decode_to_engine(m.encode(m.Submit(1, request))).request == request


def test_a_prompt_comes_back_as_ids():
    received = m.decode_to_engine(m.encode(m.Submit(1, REQUEST))).request
    assert received.prompt_array().tolist() == [0, 1, 2, 3, 4]
    assert received.num_prompt_tokens == 5


def test_words_of_finish_reasons():
    assert [reason.text for reason in m.FinishReason] == ["running", "stop", "length", "cancelled", "timeout"]
