"""Paged attention: equal to plain attention over each row alone, whatever the batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.kernels.attention import (
    NoKeys,
    PagedRows,
    RowByToken,
    WholeRows,
    attend,
    attention_reference,
    gathered_elements,
    plan_groups,
    write_kv,
)


class Batch:
    """Rows with some stored tokens each, in a cache whose free pages hold garbage."""

    def __init__(self, starts, spans, *, kv_heads=2, group=1, dim=64, page_size=4, seed=0, dtype=torch.float32):
        torch.manual_seed(seed)
        self.starts, self.spans = np.array(starts), np.array(spans)
        self.page_size = page_size
        lens = self.starts + self.spans
        pages = -(-lens // page_size)
        order = np.random.default_rng(seed).permutation(int(pages.sum())) + 1
        self.pages = order.astype(np.int32)
        self.page_starts = np.concatenate(([0], np.cumsum(pages))).astype(np.int32)
        self.layer = torch.randn(order.size + 1, 2, page_size, kv_heads, dim).mul_(100).to(dtype)
        self.k = [torch.randn(n, kv_heads, dim).to(dtype).float() for n in lens]
        self.v = [torch.randn(n, kv_heads, dim).to(dtype).float() for n in lens]
        self.q = [torch.randn(n, kv_heads * group, dim) for n in self.spans]
        for row, start in enumerate(self.starts):
            self.write(row, 0, start)

    def write(self, row, begin, end):
        position = np.arange(begin, end)
        page = self.pages[self.page_starts[row] + position // self.page_size].astype(np.int64)
        index = torch.from_numpy(page * 2 * self.page_size + position % self.page_size)
        write_kv(self.layer, index, index + self.page_size, self.k[row][begin:end], self.v[row][begin:end])

    def groups(self, window=None, causal=True, max_gather=1 << 20, **options):
        return plan_groups(
            self.starts + self.spans,
            self.spans,
            self.pages,
            self.page_starts,
            self.page_size,
            causal=causal,
            window=window,
            max_gather=max_gather,
            device=torch.device("cpu"),
            dtype=torch.float32,
            **options,
        )

    def run(self, window=None, causal=True, **options):
        for row, (start, span) in enumerate(zip(self.starts, self.spans, strict=True)):
            self.write(row, start, start + span)
        new = [slice(s, s + n) for s, n in zip(self.starts, self.spans, strict=True)]
        k = torch.cat([x[at] for x, at in zip(self.k, new, strict=True)])
        v = torch.cat([x[at] for x, at in zip(self.v, new, strict=True)])
        groups = self.groups(window, causal, **options)
        scratch = torch.full((gathered_elements(groups, self.layer),), torch.nan, dtype=self.layer.dtype)
        return attend(groups, self.layer, torch.cat(self.q), k, v, scratch)

    def expected(self, window=None, causal=True):
        rows = zip(self.q, self.k, self.v, self.starts, strict=True)
        return torch.cat([attention_reference(q, k, v, s, window, causal) for q, k, v, s in rows])


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 8])
@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=7),
    window=st.none() | st.integers(1, 20),
    causal=st.booleans(),
    by_token=st.booleans(),
    seed=st.integers(0, 99),
)
def test_ragged_batch_equals_each_row_alone(group, dim, page_size, rows, window, causal, by_token, seed):
    starts, spans = zip(*rows, strict=True)
    if sum(spans) == 0:
        return
    batch = Batch(starts, spans, group=group, dim=dim, page_size=page_size, seed=seed)
    out = batch.run(window, causal, by_token=by_token)
    torch.testing.assert_close(out, batch.expected(window, causal), rtol=1e-4, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(starts=st.lists(st.integers(0, 300), min_size=1, max_size=12), window=st.none() | st.integers(1, 64))
def test_decode_batch_equals_each_row_alone(starts, window):
    batch = Batch(starts, [1] * len(starts), group=3, page_size=16)
    torch.testing.assert_close(batch.run(window), batch.expected(window), rtol=1e-4, atol=1e-5)


def test_not_causal_rows_see_the_whole_row():
    batch = Batch([0, 5, 7], [6, 3, 1], group=3)
    torch.testing.assert_close(batch.run(causal=False), batch.expected(causal=False), rtol=1e-4, atol=1e-5)


def test_sixteen_bit_cache_is_read_as_stored():
    batch = Batch([0, 9, 17], [6, 1, 3], group=3, dtype=torch.bfloat16)
    torch.testing.assert_close(batch.run(), batch.expected(), rtol=1e-4, atol=1e-5)


def test_decode_rows_of_like_length_are_one_call():
    (group,) = Batch([30, 17, 25, 20], [1, 1, 1, 1]).groups()
    assert isinstance(group, PagedRows)
    assert group.tokens == slice(None)


def test_decode_rows_of_very_different_length_are_not_padded_to_the_longest():
    groups = Batch([4000, *range(20, 30)], [1] * 11, dim=4).groups()
    assert sorted(g.g for g in groups) == [1, 10]


@settings(max_examples=20, deadline=None)
@given(
    lens=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_by_token_no_bit_depends_on_neighbours_chunks_or_pages(lens, dtype, data):
    whole = Batch([0] * len(lens), lens, group=3, dtype=dtype)
    together = whole.run(by_token=True).split(lens)
    row = data.draw(st.integers(0, len(lens) - 1))
    start = data.draw(st.integers(0, lens[row] - 1))
    alone = Batch([start], [lens[row] - start], group=3, page_size=data.draw(st.sampled_from([1, 4, 16])), dtype=dtype)
    alone.q, alone.k, alone.v = ([x[row][cut:]] for x, cut in ((whole.q, start), (whole.k, 0), (whole.v, 0)))
    alone.write(0, 0, start)
    assert torch.equal(alone.run(by_token=True), together[row][start:])


def test_rows_planned_by_token_are_one_group_each():
    assert [type(g) for g in Batch([0, 9, 3], [5, 1, 0]).groups(by_token=True)] == [RowByToken, RowByToken]


@pytest.mark.parametrize("by_token", [False, True])
def test_queries_over_keys_that_another_step_wrote(by_token):
    # As many queries as a decoder has tokens, over the keys of an encoder; the last row has none.
    lens, queries = [9, 4, 33, 0], [3, 4, 1, 2]
    batch = Batch(lens, [0] * 4, group=3)
    batch.q = [torch.randn(n, 6, 64) for n in queries]
    batch.spans = np.array(queries)
    batch.starts = np.array(lens) - batch.spans
    groups = batch.groups(causal=False, own_keys=False, by_token=by_token)
    nothing = torch.empty(0, 2, 64)
    scratch = torch.empty(gathered_elements(groups, batch.layer))
    out = attend(groups, batch.layer, torch.cat(batch.q), nothing, nothing, scratch)
    wanted = [
        attention_reference(q, k, v, len(k), causal=False) for q, k, v in zip(batch.q, batch.k, batch.v, strict=True)
    ]
    torch.testing.assert_close(out[:-2], torch.cat(wanted[:-1]), rtol=1e-4, atol=1e-5)
    assert torch.count_nonzero(out[-2:]) == 0
    assert any(isinstance(group, NoKeys) for group in groups)


def test_what_lies_in_unowned_pages_reaches_nobody():
    batch = Batch([30, 2, 17], [2, 2, 2], group=3)
    wanted = batch.run()
    batch.layer[0] = torch.nan  # the sink, into which padding writes
    assert torch.equal(batch.run(), wanted)


def test_the_result_may_go_into_a_part_of_a_longer_tensor():
    batch = Batch([0, 7, 0], [5, 1, 5], group=3)
    longer = torch.full((20, 6, 64), torch.nan)
    for at in (slice(0, 11), slice(6, 17)):
        groups, scratch = batch.groups(), torch.empty(1 << 16)
        new = [torch.cat([x[s:] for x, s in zip(rows, batch.starts, strict=True)]) for rows in (batch.k, batch.v)]
        batch.run()
        attend(groups, batch.layer, torch.cat(batch.q), *new, scratch, longer[at])
        torch.testing.assert_close(longer[at], batch.expected(), rtol=1e-4, atol=1e-5)
        assert longer[17:].isnan().all()


def test_fresh_prompts_of_equal_length_are_one_causal_call_without_pages():
    assert Batch([0, 0, 0], [5, 5, 5]).groups() == [WholeRows(slice(None), 3, 5, True)]


def test_rows_without_new_tokens_take_part_in_nothing():
    batch = Batch([0, 8, 0], [5, 0, 0])
    assert sum(g.g * g.n for g in batch.groups()) == 5
    assert batch.run().shape[0] == 5


def test_a_prompt_longer_than_the_window_is_masked():
    (group,) = Batch([0], [9]).groups(window=4)
    assert isinstance(group, PagedRows)


def test_large_gathers_are_split_between_rows():
    batch = Batch([30, 30, 21, 25, 30], [1] * 5, group=3)
    groups = batch.groups(max_gather=70)
    assert [g.g for g in groups] == [2, 2, 1]
    assert [g.g for g in batch.groups(max_gather=1)] == [1] * 5
    torch.testing.assert_close(batch.run(max_gather=70), batch.expected(), rtol=1e-4, atol=1e-5)
