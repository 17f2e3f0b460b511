"""Messages survive the wire."""

import numpy as np
import pytest

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
    for got, expected in zip(received.arrays(), (tickets, tokens, finish), strict=True):
        assert np.array_equal(got, expected)


def test_a_prompt_comes_back_as_ids():
    received = m.decode_to_engine(m.encode(m.Submit(1, REQUEST))).request
    assert received.prompt_array().tolist() == [0, 1, 2, 3, 4]
    assert received.num_prompt_tokens == 5


def test_words_of_finish_reasons():
    assert [reason.text for reason in m.FinishReason] == ["running", "stop", "length", "cancelled", "timeout"]
