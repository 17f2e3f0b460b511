"""Arena, index and chains together under random use: every key names a page that holds exactly its content (BC-50)."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from mstar.engine.resources.kv.pages import PageArena
from mstar.engine.resources.kv.prefix.chains import PrefixChains
from mstar.engine.resources.kv.prefix.index import PrefixIndex
from mstar.engine.resources.kv.prefix.keys import chain_root, page_keys

SIZE, USABLE, ROWS, LONGEST = 4, 32, 6, 40
NOTHING = -1


@dataclass
class Request:
    text: list[int]  # prompt and kept tokens
    prompt_len: int
    pages: list[int] = field(default_factory=list)


class World:
    """A pool of 32 pages whose contents are modelled token by token."""

    def __init__(self, seed, lazy):
        self.rng = np.random.default_rng(seed)
        self.arena = PageArena(USABLE + 1)
        self.index = PrefixIndex(self.arena, SIZE, b"root")
        self.chains = PrefixChains(self.index, SIZE, ROWS, LONGEST // SIZE, lazy)
        self.content = np.full((USABLE + 1, SIZE), NOTHING)
        self.text_of = {}
        self.requests: dict[int, Request] = {}
        self.stored = np.zeros(ROWS, np.int64)
        self.written = np.zeros(ROWS, np.int64)
        self.table = np.zeros((ROWS, LONGEST // SIZE), np.int32)

    # Operations; each does nothing where it does not apply.

    def allocate(self):
        free_rows = sorted(set(range(ROWS)) - set(self.requests))
        if not free_rows:
            return
        row = free_rows[0]
        prompt = self.rng.integers(0, 2, self.rng.integers(1, 25)).tolist()
        match = self.index.match(np.array(prompt))
        self.index.lease(match)
        match = self.index.trim(match, int(self.rng.integers(0, match.num_pages + 1)))
        self.requests[row] = Request(prompt, len(prompt), match.pages.tolist())
        self.stored[row] = match.num_pages * SIZE
        self.chains.begin(row, np.array(prompt), match)

    def extend(self):
        """A step of some rows, prompt chunks and single tokens; samples are reported before or after the commit."""
        rows = [row for row in sorted(self.requests) if self.rng.random() < 0.7]
        rows = [row for row in rows if self.write(row, self.chunk(row))]
        if not rows:
            return
        array = np.array(rows)
        reports_late = self.rng.random() < 0.5
        if reports_late:
            self.commit(array)
        sampling = [row for row in rows if self.written[row] == len(self.requests[row].text)]
        tokens = self.rng.integers(0, 2, len(sampling))
        for row, token in zip(sampling, tokens.tolist(), strict=True):
            self.requests[row].text.append(token)
        self.chains.extend(np.array(sampling, np.int64), tokens)
        if not reports_late:
            self.commit(array)

    def free(self):
        self.leave(self.any_row())

    def evict(self):
        n, evictable = int(self.rng.integers(1, 6)), self.index.num_evictable
        assert self.index.evict(n) == min(n, evictable)

    def abort(self):
        """A prompt's chunk is written, its step is not committed, and the request is dropped."""
        row = self.any_row()
        if row is None or self.stored[row] >= self.requests[row].prompt_len:
            return
        text, committed = self.requests[row].text, int(self.stored[row])
        before = self.matched(text)
        if self.write(row, self.chunk(row)):
            self.leave(row)
            assert self.matched(text) <= max(before, committed // SIZE)

    # How they are carried out.

    def any_row(self):
        return int(self.rng.choice(sorted(self.requests))) if self.requests else None

    def matched(self, text):
        return self.index.match(np.append(text, 0)).num_pages

    def chunk(self, row):
        left = self.requests[row].prompt_len - self.stored[row]
        return int(self.rng.integers(1, left + 1)) if left > 0 else 1

    def write(self, row, count):
        """Reserves pages for ``count`` more tokens, evicting the shortfall, and writes them; False without room."""
        request, start = self.requests[row], int(self.stored[row])
        end = start + count
        if end > LONGEST:
            return False
        need = -(-end // SIZE) - len(request.pages)
        short = need - self.arena.num_free
        if short > 0:
            self.index.evict(short)
        pages = self.arena.try_allocate(max(need, 0))
        if pages is None:
            return False
        request.pages += pages.tolist()
        self.content[pages] = NOTHING
        for position in range(start, end):
            page = request.pages[position // SIZE]
            assert not self.arena.is_sealed(np.array([page])).any(), "a sealed page is written"
            self.content[page, position % SIZE] = request.text[position]
        self.written[row] = end
        return True

    def commit(self, rows):
        for row in rows.tolist():
            self.stored[row] = self.written[row]
            self.table[row, : len(self.requests[row].pages)] = self.requests[row].pages
        self.chains.committed(rows, self.stored[rows], self.table)

    def leave(self, row):
        if row is None:
            return
        self.chains.flush(row)
        self.chains.committed(np.array([row]), self.stored[[row]], self.table)
        self.chains.end(row)
        request = self.requests.pop(row)
        self.table[row] = 0
        self.stored[row] = 0
        self.arena.release(np.array(request.pages, np.int32))
        self.remember(request.text)

    # What must hold.

    def remember(self, text):
        keys = page_keys(chain_root(b"root"), np.array(text), (), SIZE)
        self.text_of |= {key: text[i * SIZE : (i + 1) * SIZE] for i, key in enumerate(keys)}

    def check(self):
        held = [page for request in self.requests.values() for page in request.pages]
        cached = self.index.pages()
        self.arena.check(np.array([*held, *cached], np.int64))
        for request in self.requests.values():
            self.remember(request.text)
        for key, page in self.index._page_of.items():
            assert self.content[page].tolist() == self.text_of[key]
        assert self.arena.is_sealed(cached).all()
        assert self.arena.num_free + len(set(held) | set(cached.tolist())) == USABLE


@pytest.mark.parametrize(("seed", "lazy"), [(0, 1), (1, 3)])
def test_ten_thousand_random_operations_on_32_pages(seed, lazy):
    world = World(seed, lazy)
    operations = [world.allocate, world.extend, world.extend, world.extend, world.free, world.evict, world.abort]
    for choice in world.rng.integers(0, len(operations), 10_000).tolist():
        operations[choice]()
        world.check()
    counters = world.index.counters
    assert min(counters["hits"], counters["misses"], counters["insertions"], counters["evictions"]) > 100
    for row in sorted(world.requests):
        world.leave(row)
    world.check()
    assert world.arena.num_free + len(world.index) == USABLE
    assert world.index.num_evictable == len(world.index)
