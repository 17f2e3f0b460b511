"""The CPU's paged decode kernel: equal to plain attention over each row alone, and to the bit whatever the batch."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.kernels.attention import attention_reference
from mstar.kernels.cpu import jit
from mstar.kernels.cpu.paged_decode import PagedDecode, PagedDecodeKernel, first_seen, paged_decode_kernel


def host_lanes():
    try:
        return jit.vector_lanes() if jit.llvm is not None else 0
    except OSError:
        return 0


pytestmark = pytest.mark.skipif(not host_lanes(), reason="needs llvmlite and AVX2")
kernel_of = functools.cache(PagedDecodeKernel)
GROUPS, DIMS, PAGE_SIZES = [1, 3, 8], [64, 128], [1, 4, 16]


class Rows:
    """Rows of ``lens`` tokens whose last one is new.  Whatever no row has stored in the cache is NaN."""

    def __init__(self, lens, *, kv_heads=2, group=3, dim=64, page_size=16, seed=0):
        torch.manual_seed(seed)
        heads = kv_heads * group
        self.shape = (heads, kv_heads, dim, page_size)
        self.lens = np.array(lens, np.int64)
        pages = -(-self.lens // page_size)
        order = np.random.default_rng(seed).permutation(int(pages.sum())) + 1
        self.pages = order.astype(np.int32)
        self.page_starts = (np.cumsum(pages) - pages).astype(np.int32)
        self.layer = torch.full((order.size + 1, 2, page_size, kv_heads, dim), torch.nan)
        self.k = [torch.randn(n, kv_heads, dim) for n in lens]
        self.v = [torch.randn(n, kv_heads, dim) for n in lens]
        self.q = torch.randn(len(lens), heads, dim)
        for row, n in enumerate(lens):
            page, offset = self.places(row, np.arange(n - 1))
            self.layer[page, 0, offset], self.layer[page, 1, offset] = self.k[row][:-1], self.v[row][:-1]

    def places(self, row, positions):
        page, offset = np.divmod(positions, self.shape[3])
        return self.pages[self.page_starts[row] + page].astype(np.int64), offset

    def run(self, rows=None, window=None, lanes=None, step=None):
        """``rows`` as one batch, all by default; q, k and v are views of one tensor, as a model hands them over.

        ``step`` is planned anew; None for a new one.
        """
        rows = range(self.lens.size) if rows is None else rows
        new = [torch.cat((self.q[r], self.k[r][-1], self.v[r][-1])) for r in rows]
        heads, kv_heads = self.shape[:2]
        q, k, v = torch.stack(new).split((heads, kv_heads, kv_heads), dim=1)
        index = np.array(rows)
        ends = self.lens[index]
        step = step or PagedDecode(kernel_of(*self.shape, lanes=lanes))
        step.plan(ends, self.pages, self.page_starts[index], first_seen(ends, window))
        return step.attend(self.layer, q, k, v)

    def run_spans(self, spans, causal=True, window=None, rows=None, q=None, step=None):
        """The last ``spans`` tokens of each row as one batch over keys that are stored; queries [tokens, ...]."""
        rows = np.arange(self.lens.size) if rows is None else np.array(rows)
        step = step or PagedDecode(kernel_of(*self.shape))
        step.plan_rows(
            self.lens[rows],
            np.array(spans),
            self.pages,
            self.page_starts[rows],
            causal=causal,
            window=window,
        )
        nothing = torch.empty(0, *self.q.shape[1:])
        return step.attend(self.layer, q, nothing, nothing)

    def expected(self, window=None):
        rows = zip(self.q, self.k, self.v, self.lens.tolist(), strict=True)
        return torch.cat([attention_reference(q[None], k, v, n - 1, window) for q, k, v, n in rows])


lengths = st.lists(st.integers(1, 90) | st.integers(1, 1000), min_size=1, max_size=6)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("group", GROUPS)
@settings(max_examples=6, deadline=None)
@given(lens=lengths, window=st.none() | st.integers(1, 200), seed=st.integers(0, 99))
def test_ragged_batch_equals_each_row_alone(group, dim, page_size, lens, window, seed):
    rows = Rows(lens, group=group, dim=dim, page_size=page_size, seed=seed)
    torch.testing.assert_close(rows.run(window=window), rows.expected(window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("page_size", [4, 10, 16])
@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_every_width_of_vector_gives_the_same(page_size, lanes, window):
    if lanes > host_lanes():
        pytest.skip("needs AVX-512")
    rows = Rows([1, 7, 16, 33, 250], page_size=page_size)
    torch.testing.assert_close(rows.run(window=window, lanes=lanes), rows.expected(window), rtol=1e-5, atol=1e-5)


def test_the_new_token_is_stored_in_its_page():
    rows = Rows([1, 16, 17, 40])
    rows.run()
    for row, n in enumerate(rows.lens):
        page, offset = rows.places(row, np.arange(n))
        assert torch.equal(rows.layer[page, 0, offset], rows.k[row])
        assert torch.equal(rows.layer[page, 1, offset], rows.v[row])
    stored = int(rows.lens.sum()) * rows.layer[0, 0, 0].numel()
    assert int(rows.layer.isfinite().sum()) == 2 * stored  # and nowhere else


@settings(max_examples=25, deadline=None)
@given(lens=lengths, data=st.data())
def test_a_row_does_not_depend_on_its_neighbours(lens, data):
    rows = Rows(lens)
    together = rows.run()
    some = data.draw(st.permutations(range(len(lens))))[: data.draw(st.integers(1, len(lens)))]
    assert torch.equal(rows.run(some), together[some])


@pytest.mark.parametrize("lens", [[1], [700, 3, 3], [5] * 9, [1000, 900, 1, 64]])
def test_a_row_does_not_depend_on_the_number_of_threads(lens):
    rows, before, outputs = Rows(lens), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outputs.append(rows.run())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_planned_again_and_again_it_gives_what_a_new_one_gives():
    """Over batches that grow and shrink, longer and shorter rows, other pages, windows, spans and threads."""
    before, again = torch.get_num_threads(), PagedDecode(kernel_of(6, 2, 64, 16))
    batches = [([5, 9], None, 2), ([400] * 9, None, 1), ([3], 2, 1), ([2000, 1, 70], None, 3), ([5, 9], None, 2)]
    try:
        for lens, window, threads in batches:
            torch.set_num_threads(threads)
            rows = Rows(lens)
            wanted = rows.run(window=window)
            for _ in range(2):
                assert torch.equal(rows.run(window=window, step=again), wanted)
            spans = [min(n, 7) for n in lens]
            q = torch.randn(sum(spans), *rows.q.shape[1:])
            assert torch.equal(rows.run_spans(spans, q=q, step=again), rows.run_spans(spans, q=q))
    finally:
        torch.set_num_threads(before)


spans_of_rows = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 1 << 16)), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(rows=spans_of_rows, causal=st.booleans(), window=st.none() | st.integers(1, 40))
def test_rows_of_any_span_equal_each_row_alone(rows, causal, window):
    lens, spans = [n for n, _ in rows], [seed % (n + 1) for n, seed in rows]
    batch = Rows(lens)
    batch.run()  # stores the last token
    q = torch.randn(sum(spans), *batch.q.shape[1:])
    out = batch.run_spans(spans, causal, window, q=q)
    parts = zip(q.split(spans), batch.k, batch.v, lens, spans, strict=True)
    wanted = [attention_reference(q, k, v, n - span, window, causal) for q, k, v, n, span in parts]
    torch.testing.assert_close(out, torch.cat(wanted), rtol=1e-5, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(lens=lengths, window=st.none() | st.integers(1, 40), data=st.data())
def test_a_token_has_the_bits_that_decode_gives_it_however_its_prompt_is_cut(lens, window, data):
    batch = Rows(lens)
    decoded = batch.run(window=window)
    row = data.draw(st.integers(0, len(lens) - 1))
    span = data.draw(st.integers(1, lens[row]))
    q = torch.randn(span, *batch.q.shape[1:])
    q[-1] = batch.q[row]
    out = batch.run_spans([span], window=window, rows=[row], q=q)
    assert torch.equal(out[-1], decoded[row])
    cut = data.draw(st.integers(0, span))
    again = batch.run_spans([span - cut], window=window, rows=[row], q=q[cut:])
    assert torch.equal(again, out[cut:])


def test_a_query_without_keys_gives_zeros():
    batch = Rows([20, 1])
    batch.run()
    batch.lens[1] = 0
    q = torch.randn(4, *batch.q.shape[1:])
    out = batch.run_spans([2, 2], causal=False, q=q)
    assert torch.count_nonzero(out[2:]) == 0
    torch.testing.assert_close(out[:2], attention_reference(q[:2], batch.k[0], batch.v[0], 18, causal=False))


def test_weights_are_exact_for_scores_far_apart():
    rows = Rows([60, 200], group=1)
    rows.q *= 40
    torch.testing.assert_close(rows.run(), rows.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_query_that_is_not_finite_spoils_its_own_row_only(bad):
    rows = Rows([20, 30, 40])
    wanted = rows.run()
    rows.q[1, :, 5] = bad
    out = rows.run()
    assert not out[1].isfinite().any()
    assert torch.equal(out[[0, 2]], wanted[[0, 2]])


def test_heads_that_do_not_fill_vectors_have_no_kernel(caplog):
    assert paged_decode_kernel(2, 2, 20, 16) is None
    assert "head_dim 20" in caplog.text
