"""Records of the engine as dicts by token id."""

import numpy as np

from mstar.conductor.request import LOGPROB
from mstar.runtime.logprobs import Logprob, positions


class Names:
    def token_text(self, token_id):
        return f"<{token_id}>"


def record(logprob, rank, top):
    entry = np.zeros(1, LOGPROB)
    entry["logprob"], entry["rank"], entry["top_ids"] = logprob, rank, -1
    for index, (token_id, value) in enumerate(top):
        entry["top_ids"][0, index], entry["top_logprobs"][0, index] = token_id, value
    return entry


RECORDS = np.concatenate([
    record(-0.5, 1, [(7, -0.5), (3, -1.5), (9, -2.5)]),
    record(-8.0, 40, [(7, -0.25), (3, -1.5), (9, -2.5)]),
    record(-1.5, 2, [(7, -0.25), (3, -1.5)]),
])  # fmt: skip
IDS = [7, 5, 3]


def test_the_own_token_stands_first_and_once():
    told = positions(RECORDS, IDS, 2, Names())
    assert [list(position) for position in told] == [[7, 3], [5, 7, 3], [3, 7]]
    assert told[1] == {
        5: Logprob(-8.0, 40, "<5>"),
        7: Logprob(-0.25, 1, "<7>"),
        3: Logprob(-1.5, 2, "<3>"),
    }


def test_no_more_is_told_than_asked_for_or_there_is():
    assert positions(RECORDS, np.array(IDS), 0, Names())[1] == {5: Logprob(-8.0, 40, "<5>")}
    assert [len(position) for position in positions(RECORDS, IDS, 20, Names())] == [3, 4, 2]
    assert positions(RECORDS[:0], [], 5, Names()) == []
