"""Chains of live streams: pages are indexed when they are full, committed and known, whether lazily or not."""

import numpy as np
import pytest

from mstar.engine.resources.kv.pages import PageArena
from mstar.engine.resources.kv.prefix.chains import MAX_UNREPORTED, PrefixChains
from mstar.engine.resources.kv.prefix.index import PrefixIndex
from mstar.engine.resources.kv.prefix.keys import PrefixItem

SIZE = 4
LAZY = [1, 3, 7, 16, 128]


class Streams:
    """Streams that hold pages for a long text from the start; commits move their length."""

    def __init__(self, lazy=1, num_streams=4, max_pages=64):
        self.arena = PageArena(1 + num_streams * max_pages)
        self.index = PrefixIndex(self.arena, SIZE, b"root")
        self.chains = PrefixChains(self.index, SIZE, num_streams, max_pages, lazy)
        self.stored = np.zeros(num_streams, np.int64)
        self.table = self.arena.try_allocate(num_streams * max_pages).reshape(num_streams, max_pages)

    def begin(self, stream, ids, items=(), salt=""):
        match = self.index.match(np.asarray(ids), items, salt)
        self.chains.begin(stream, np.asarray(ids), match, items)
        return match

    def commit(self, streams, lengths):
        streams = np.array(streams)
        self.stored[streams] += lengths
        return self.chains.committed(streams, self.stored[streams], self.table)

    def extend(self, streams, tokens):
        self.chains.extend(np.array(streams), np.array(tokens))

    def generate(self, stream, tokens):
        """Each token is sampled, and stored by the next step; the last one never is."""
        for i, token in enumerate(tokens):
            if i:
                self.commit([stream], 1)
            self.extend([stream], [token])

    def matched(self, ids):
        return self.index.match(np.append(ids, 1)).num_pages


def test_a_prompts_pages_are_indexed_as_far_as_they_were_committed():
    streams = Streams()
    prompt = np.arange(14)
    streams.begin(0, prompt)
    for chunk, expected in ((3, 0), (1, 1), (7, 1), (3, 1)):
        assert streams.commit([0], chunk) == expected
    assert streams.matched(prompt) == 3


def test_the_page_of_the_prompts_tail_and_the_first_tokens_is_indexed_by_the_commit_that_fills_it():
    streams = Streams()
    streams.begin(0, np.arange(6))
    streams.commit([0], 6)
    streams.extend([0], [50])
    assert streams.commit([0], 1) == 0
    streams.extend([0], [51])
    assert streams.commit([0], 1) == 1
    assert streams.matched([0, 1, 2, 3, 4, 5, 50, 51]) == 2


def test_an_item_in_the_prompts_tail_counts_for_the_page_it_shares_with_generated_tokens():
    streams = Streams()
    prompt, items = np.arange(6), [PrefixItem(1, 1, b"dog"), PrefixItem(3, 2, b"cat")]
    streams.begin(0, prompt, items)
    streams.commit([0], 6)
    streams.generate(0, [50, 51, 52, 53, 54, 55, 56])
    text = np.array([0, 1, 2, 3, 4, 5, 50, 51, 52, 53, 54, 55, 1])
    assert streams.index.match(text, items).pages.tolist() == streams.table[0, :3].tolist()
    assert streams.index.match(text).num_pages == 0
    assert streams.index.match(text, items[:1]).num_pages == 0


@pytest.mark.parametrize("lazy", LAZY)
def test_a_request_that_stops_on_a_boundary_does_not_index_that_page(lazy):
    """Its last token was sampled and never stored, so the page is one token short."""
    streams = Streams(lazy)
    prompt = np.arange(5)
    streams.begin(0, prompt)
    streams.commit([0], 5)
    streams.generate(0, [9, 9, 9])
    streams.chains.flush(0)
    assert streams.commit([0], 0) == 0
    assert streams.matched([*prompt, 9, 9, 9]) == 1
    streams.commit([0], 1)  # one token more, and it was stored
    assert streams.matched([*prompt, 9, 9, 9]) == 2


@pytest.mark.parametrize("lazy", LAZY)
@pytest.mark.parametrize("stored", [0, 3, 6, 9, 20, 21, 21 + MAX_UNREPORTED, 22 + MAX_UNREPORTED])
@pytest.mark.parametrize("items", [(), (PrefixItem(1, 1, b"dog"), PrefixItem(13, 3, b"cat"))])
def test_one_that_ends_alone_leaves_what_it_leaves_among_others(lazy, stored, items):
    prompt, answer, left = np.arange(14), list(range(50, 57)), []
    for is_alone in (True, False):
        streams = Streams(lazy)
        streams.begin(0, prompt, items)
        for token in answer:
            streams.extend([0, 1], [token, token])
        streams.stored[0] = stored
        if is_alone:
            streams.chains.complete(0, stored, streams.table[0])
        else:
            streams.chains.flush(0)
            streams.commit([0], 0)
            streams.chains.end(0)
        assert not streams.chains.is_live(0)
        assert not len(streams.chains.coming)
        found = streams.index.match(np.array([*prompt, *answer, 1]), items)
        left.append((found.num_pages, found.pages.tolist(), len(streams.index), streams.arena.num_idle))
    assert left[0] == left[1]
    assert left[0][0] == (0 if stored > 21 + MAX_UNREPORTED else min(stored, 21) // SIZE)


def test_with_a_step_running_ahead_a_page_waits_for_its_tokens_to_be_reported():
    streams = Streams()
    streams.begin(0, np.arange(6))
    streams.commit([0], 6)
    streams.commit([0], 1)  # stores a token that is still on the device
    streams.extend([0], [50])
    assert streams.commit([0], 1) == 0
    streams.extend([0], [51])
    assert streams.commit([0], 1) == 1
    assert streams.chains.is_live(0)
    assert streams.matched([0, 1, 2, 3, 4, 5, 50, 51]) == 2


@pytest.mark.parametrize("lazy", LAZY)
def test_a_chain_that_lost_count_ends_and_one_with_waiting_tokens_does_not(lazy):
    streams = Streams(lazy)
    for stream in (0, 1):
        streams.begin(stream, np.arange(6) + stream)
    streams.commit([0, 1], 6)
    for i in range(MAX_UNREPORTED + 3):
        assert streams.chains.is_live(1) is (i <= MAX_UNREPORTED)
        streams.extend([0], [5])
        streams.commit([0, 1], 1)
    assert streams.chains.is_live(0)
    assert not streams.chains.is_live(1)
    assert streams.matched(np.arange(6) + 1) == 1


def test_streams_without_a_chain_are_skipped():
    streams = Streams(lazy=3)
    streams.begin(1, np.arange(6))
    for _ in range(3):
        streams.extend([0, 1, 2], [7, 8, 9])
    assert streams.commit([0, 1, 2], 6) == 1
    assert len(streams.chains.keys_of(1)) == 2
    streams.extend([0, 2], [1, 1])
    assert streams.chains.backlog_steps == 0


def test_the_next_stream_of_a_row_inherits_no_waiting_tokens():
    streams = Streams(lazy=16)
    streams.begin(0, np.arange(4))
    streams.begin(1, np.arange(4))
    streams.extend([0, 1], [7, 7])
    streams.begin(0, np.arange(100, 104))
    for _ in range(4):
        streams.extend([1, 0], [8, 9])
    streams.chains.flush_chain_backlog()
    streams.commit([0, 1], 8)
    assert streams.matched([100, 101, 102, 103, 9, 9, 9, 9]) == 2
    assert streams.matched([0, 1, 2, 3, 7, 8, 8, 8]) == 2


def test_one_streams_tokens_are_flushed_without_the_others():
    streams = Streams(lazy=16)
    for stream in (0, 1):
        streams.begin(stream, np.full(4, stream))
    for token in (5, 6, 7, 8):
        streams.extend([1, 0], [token + 10, token])
    streams.chains.flush(0)
    assert [len(streams.chains.keys_of(stream)) for stream in (0, 1)] == [2, 1]
    streams.chains.flush(0)
    streams.chains.flush_chain_backlog()
    assert [len(streams.chains.keys_of(stream)) for stream in (0, 1)] == [2, 2]
    streams.commit([0, 1], 8)
    assert streams.matched([0, 0, 0, 0, 5, 6, 7, 8]) == streams.matched([1, 1, 1, 1, 15, 16, 17, 18]) == 2


def test_flushing_is_idempotent():
    streams = Streams(lazy=16)
    streams.begin(0, np.arange(4))
    for token in range(5):
        streams.extend([0], [token])
    for _ in range(2):
        streams.chains.flush_chain_backlog()
        assert len(streams.chains.keys_of(0)) == 2
        assert streams.chains.backlog_steps == 0


def test_the_callers_arrays_may_be_reused():
    streams = Streams(lazy=16)
    streams.begin(0, np.arange(3))
    rows, tokens = np.array([0]), np.array([5])
    streams.chains.extend(rows, tokens)
    tokens[0] = rows[0] = 3
    streams.commit([0], 4)
    streams.chains.flush_chain_backlog()
    streams.commit([0], 0)
    assert streams.matched([0, 1, 2, 5]) == 1


def test_pages_out_of_the_index_are_not_offered_again():
    streams = Streams()
    prompt = np.arange(10)
    streams.begin(0, prompt)
    streams.commit([0], 10)
    match = streams.begin(1, prompt)
    assert match.num_pages == 2
    streams.stored[1] = 8
    assert streams.commit([1], 2) == 0
    streams.generate(1, [5, 6, 7])
    assert streams.index.match(np.array([*prompt, 5, 6, 1])).pages.tolist() == [
        *streams.table[0, :2].tolist(),
        int(streams.table[1, 2]),
    ]


@pytest.mark.parametrize("lazy", LAZY)
@pytest.mark.parametrize("prompt_len", [1, 4, 6])
def test_a_lazy_chain_is_never_ahead_of_an_eager_one_and_fewer_steps_behind_than_its_batch(lazy, prompt_len):
    eager, late = Streams(1), Streams(lazy)
    tokens = np.random.default_rng(prompt_len).integers(0, 100, 150)
    history = []
    for streams in (eager, late):
        streams.begin(0, np.arange(prompt_len))
        streams.commit([0], prompt_len)
    for token in tokens.tolist():
        for streams in (eager, late):
            streams.extend([0], [token])
            streams.commit([0], 1)
        history.append(len(eager.chains.keys_of(0)))
        keys = late.chains.keys_of(0)
        assert keys == eager.chains.keys_of(0)[: len(keys)]
        assert len(keys) >= (history[-lazy] if len(history) >= lazy else history[0])
        assert late.chains.backlog_steps < lazy
    late.chains.flush_chain_backlog()
    late.commit([0], 0)
    assert late.chains.keys_of(0) == eager.chains.keys_of(0)
    assert late.matched([*range(prompt_len), *tokens]) == eager.matched([*range(prompt_len), *tokens])
